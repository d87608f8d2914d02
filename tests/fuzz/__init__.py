"""Random programs round norms, compiled and compared with eager. `make fuzz` runs any number of them."""
