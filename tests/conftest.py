"""Shape annotations of blocks are checked while tests run."""

from jaxtyping import install_import_hook

install_import_hook("blocks", "beartype.beartype")
