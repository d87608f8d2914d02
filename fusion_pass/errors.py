"""The error that is the fault of what a person asked for, and not of this package."""


class UserError(Exception):
    """What was asked cannot be done; the message says why, in words for the person who asked."""
