"""The error every user mistake raises; the command line prints its message and exits with 2."""


class UserError(ValueError):
    """Something asked for cannot be done as asked; the message says where, the rule, the values and the remedy."""
