"""The traps that this kind of backend falls into, each seen in the field, and the tests that stand at each.

Run as a command (`make traps`), it writes the section of docs/reliability.md.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Trap:
    """`tests`: `path::function` under tests/; those in gpu/ need an NVIDIA GPU, and never stand alone but
    where the trap is of GPUs only."""

    section: str
    text: str
    tests: tuple[str, ...]


def missing(trap: Trap) -> list[str]:
    """The listed tests that do not exist."""
    return [test for test in trap.tests if test.partition("::")[2] not in _functions(test.partition("::")[0])]


@lru_cache
def _functions(path: str) -> frozenset[str]:
    file = TESTS / path
    if not file.is_file():
        return frozenset()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


_HERE, _ONCE = "test_traps.py", "test_once_wrong.py"
_GRAPH, _REWRITE = "fusion_pass/test_traps_graph.py", "fusion_pass/test_rewrite.py"
_GROW, _WRITTEN = "patterns/test_grow.py", "patterns/test_handwritten_norm.py"
_LIBRARY, _CODE = "patterns/test_library_norm.py", "kernels/test_codegen.py"


def _graph(text: str, *tests: str) -> Trap:
    return Trap("Graph", text, tests)


def _numbers(text: str, *tests: str) -> Trap:
    return Trap("Numbers", text, tests)


def _machinery(text: str, *tests: str) -> Trap:
    return Trap("Machinery", text, tests)


TRAPS = (
    _graph("A value, its base or a view of it is written in place before it is used",
           f"{_REWRITE}::test_mutation", f"{_GROW}::test_operand_written_between_its_use_and_the_norm",
           f"{_WRITTEN}::test_value_written_between_statistics_and_product",
           "fuzz/test_fuzz.py::test_programs_agree_with_eager"),
    _graph("The result is copied back into a graph input",
           f"{_HERE}::test_an_input_that_the_norm_is_copied_into"),
    _graph("A rewrite must not add a writing op: fused ops make new tensors",
           "fusion_pass/test_ops.py::test_opcheck", "kernels/test_reference.py::test_layout_and_ownership"),
    _graph("A result of unbind or split is written later", f"{_REWRITE}::test_mutation",
           f"{_GROW}::test_output_view_written_later"),
    _graph("What shares memory with an input in eager still does, and two outputs are never one tensor",
           f"{_REWRITE}::test_outputs_alias_what_they_alias_in_eager",
           f"{_GROW}::test_unused_and_doubly_returned_results"),
    _graph("Strides of outputs are eager's: dense from a library norm, the input's from a handwritten one",
           f"{_GROW}::test_transposed_residual_keeps_eagers_strides", "fusion_pass/test_ops.py::test_opcheck",
           f"{_ONCE}::test_strides_of_size_one_dims_are_eagers"),
    _graph("The rows of q in a packed qkv have no single stride", "patterns/test_rows.py::test_model_rows",
           "kernels/test_layout.py::test_permuted_view_keeps_memory_order"),
    _graph("A storage offset leaves the base pointer misaligned", f"{_GRAPH}::test_storage_offset",
           "kernels/test_launch.py::test_a_plan_per_layout_dtype_and_alignment",
           "gpu/test_kernel_numerics.py::test_misaligned_base"),
    _graph("Somebody else reads the sum before a norm, or its result: post-norm, two modulates, hooks, "
           "hidden states", f"{_GRAPH}::test_other_readers", f"{_GRAPH}::test_a_hook_reads_the_norm",
           f"{_GROW}::test_two_modulates_of_one_norm", f"{_GROW}::test_post_norm_that_is_added"),
    _graph("With symbolic sizes eps is a tensor and an item(): two of them, and one that changes later",
           f"{_LIBRARY}::test_two_eps_in_one_graph_and_a_later_change",
           "fusion_pass/test_backend.py::test_eps_at_run_time"),
    _graph("Ambient autocast leaves no node", f"{_GRAPH}::test_ambient_autocast",
           f"{_GRAPH}::test_autocast_changed_between_calls"),
    _graph("Autocast that begins and ends inside the graph", f"{_GRAPH}::test_autocast_inside"),
    _graph("Regions without gradients, and one module called with and without",
           "fusion_pass/test_training.py::test_no_grad_within_a_graph",
           "fusion_pass/test_training.py::test_one_module_with_and_without_grad"),
    _graph("Dropout between add and norm draws the same numbers", f"{_GRAPH}::test_dropout_draws_as_in_eager",
           f"{_GROW}::test_dropout_stops_growth_and_keeps_the_random_stream",
           f"{_ONCE}::test_draws_keep_their_order"),
    _graph("Higher-order ops (cond, checkpoint, flex attention, users' Triton kernels) pass through",
           f"{_GRAPH}::test_cond", f"{_GRAPH}::test_checkpoint", f"{_GRAPH}::test_flex_attention",
           "fusion_pass/test_graph.py::test_a_higher_order_op_is_a_barrier",
           f"{_ONCE}::test_norms_inside_a_checkpoint_are_declined_by_name"),
    _graph("Custom ops keep their order and what they write",
           f"{_GRAPH}::test_custom_ops_keep_their_order", f"{_GRAPH}::test_custom_ops_that_write"),
    _graph("Tensor subclasses: distributed, nested, quantised, others",
           f"{_HERE}::test_distributed_tensors", f"{_HERE}::test_quantised_tensors",
           f"{_GRAPH}::test_nested_tensors", f"{_GRAPH}::test_wrapper_subclasses_pass_through",
           f"{_GRAPH}::test_torch_function_subclasses"),
    _graph("functional_call and vmap", f"{_GRAPH}::test_functional_call",
           f"{_GRAPH}::test_vmap_is_declined_with_the_reason_and_the_rest_is_fused"),
    _graph("No symbolic size becomes an int, no guard is added, no batch size compiles again",
           "fusion_pass/test_backend.py::test_as_many_graphs_and_guards_as_eager",
           "fusion_pass/test_backend.py::test_no_recompile_for_new_sizes",
           "fusion_pass/test_graph.py::test_sizes_are_compared_without_guards"),
    _numbers("Casts in another order change the logits: a site rounds where the model does",
             "kernels/test_reference.py::test_llama_rounds_where_llama_does",
             f"{_CODE}::test_rounding_only_where_it_matters"),
    _numbers("E[x^2] - E[x]^2 in fp32 where the mean is 1000 or 3000 standard deviations",
             f"{_HERE}::test_moments_far_from_zero", f"{_WRITTEN}::test_mean_far_from_zero",
             f"{_CODE}::test_mean_1000_in_column_passes", "kernels/test_offline.py::test_mean_1000"),
    _numbers("Padded lanes inside the variance; lanes of 1, 3, 17, 513 numbers", f"{_CODE}::test_norms",
             f"{_CODE}::test_equal_values_are_centred_to_zero", f"{_WRITTEN}::test_lane_of_one"),
    _numbers("A lane longer than a block is not cut", f"{_CODE}::test_column_passes",
             "kernels/test_tiling.py::test_column_tiles_divide_the_lane_where_they_can"),
    _numbers("Rows times stride beyond 2^31", "kernels/test_layout.py::test_wide_offsets",
             "gpu/test_kernel_numerics.py::test_rows_past_32_bits"),
    _numbers("Statistics of fp16 in fp32, whatever the model cast", f"{_CODE}::test_norms",
             f"{_WRITTEN}::test_mean_far_from_zero"),
    _numbers("fp64 input has fp64 statistics, or is declined", f"{_CODE}::test_float64",
             "kernels/test_launch.py::test_npu_has_no_float64"),
    _numbers("eps added to the standard deviation is another function",
             "patterns/test_variants.py::test_look_alikes_are_left_alone"),
    _numbers("A negative eps", f"{_HERE}::test_negative_eps", "opinfo/test_opinfo.py::test_samples"),
    _numbers("rms_norm without eps takes that of the type it computes in",
             f"{_HERE}::test_rms_norm_without_eps_takes_that_of_the_type_it_computes_in"),
    _numbers("Inf and NaN stay in their row", f"{_CODE}::test_bad_values_stay_in_their_row",
             f"{_WRITTEN}::test_rows_with_inf_nan_and_zeros"),
    _numbers("A weight that is not of the normalised shape",
             "patterns/test_variants.py::test_a_weight_of_another_shape_keeps_its_own_meaning"),
    _numbers("Weight or bias alone, neither, several normalised dims, the channels of an image",
             f"{_LIBRARY}::test_affine", f"{_LIBRARY}::test_bias_without_weight",
             f"{_LIBRARY}::test_several_normalised_dims",
             "patterns/test_channel_norm.py::test_channels_last_memory_is_fused"),
    _numbers("Operands of several dtypes promote, or are refused, as in eager",
             f"{_GROW}::test_mixed_dtypes_promote_as_eager_does",
             "patterns/test_variants.py::test_weight_before_the_statistics_of_another_dtype_is_declined"),
    _numbers("No rows, no columns, dims of size 1, expanded inputs", "kernels/test_launch.py::test_no_rows",
             "kernels/test_launch.py::test_no_columns", f"{_CODE}::test_an_expanded_input",
             "kernels/test_layout.py::test_size_one_dims_and_single_rows", f"{_GRAPH}::test_other_readers"),
    _numbers("Statistics in the loop of tl.dot are wrong for large tiles on Hopper",
             "gpu/test_chains.py::test_every_tile_of_the_tuning_set_is_right"),
    _machinery("A folder named kernels beside transformers, which probes for a package of that name",
               "fusion_pass/test_backend.py::test_transformers_beside_our_folders",
               "test_packaging.py::test_the_module_kernels_is_not_ours"),
    _machinery("Keys of a state_dict, deepcopy and pickle of a compiled model",
               f"{_HERE}::test_the_keys_of_a_state_dict_stay",
               "fusion_pass/test_backend.py::test_copies_of_a_compiled_model"),
    _machinery("Hooks registered before compiling run; those registered later do what Dynamo does with them",
               "fusion_pass/test_backend.py::test_hooks_registered_before_compiling_run",
               f"{_HERE}::test_hooks_registered_after_compiling_do_what_they_do_without_us"),
    _machinery("Many threads compile and run",
               "fusion_pass/test_backend.py::test_eight_threads_compile_and_run_different_models",
               "fusion_pass/test_backend.py::test_threads_share_one_compiled_model",
               "kernels/test_launch.py::test_threads"),
    _machinery("A graph that a compiler caches refers to nothing of this process",
               f"{_HERE}::test_a_graph_for_another_compiler_holds_nothing_of_this_process"),
    _machinery("An opaque op in the middle of a chain makes another compiler slower",
               "patterns/test_chain.py::test_another_compiler_that_runs_products_as_they_are",
               "kernels/test_chain_choice.py::test_the_fastest_right_way_is_taken"),
    _machinery("Nothing is measured while a CUDA graph is captured",
               "gpu/test_chains.py::test_first_call_inside_a_capture_measures_nothing_and_the_next_does",
               "kernels/test_chain_ways.py::test_a_first_call_inside_a_capture",
               "gpu/test_kernel_numerics.py::test_a_graph_can_be_captured"),
    _machinery("Dynamo does not trace into the launcher",
               "kernels/test_launch.py::test_dynamo_does_not_trace_into_it"),
    _machinery("The wrapper of torch.library.custom_op costs more than a kernel",
               f"{_HERE}::test_ops_are_defined_without_the_slow_wrapper"),
    _machinery("A NumPy that Triton's interpreter does not know; packages that a wheel does not declare",
               "test_packaging.py::test_pins_lie_within_what_the_project_asks_for",
               f"{_CODE}::test_a_process_can_interpret_and_compile"),
)


def main() -> None:
    """Write the table."""
    from pages import write_section

    rows = [f"| {trap.section} | {trap.text} | {', '.join(f'`{test}`' for test in trap.tests)} |"
            for trap in TRAPS]
    text = [f"{len(TRAPS)} traps, {sum(len(trap.tests) for trap in TRAPS)} tests; the table is "
            "[tests/traps.py](../tests/traps.py), and a test checks that each of them exists. Those in "
            "`gpu/` need an NVIDIA GPU.", "", "| | trap | tests |", "|---|---|---|", *rows]
    write_section("reliability.md", "traps", "\n".join(text))


if __name__ == "__main__":
    main()
