"""The checker of annotations in tests: an int is a float, as in type checkers."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
