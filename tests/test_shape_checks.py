"""What tests check of annotations: axes where a function names some, kinds of values elsewhere."""

import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation
from jaxtyping import TypeCheckError

from blocks.families import Dims, Role, linear
from blocks.ops.running_sum import running_sum


def test_an_axis_that_is_missing_is_an_error() -> None:
    with pytest.raises(TypeCheckError, match="running_sum"):
        running_sum(torch.zeros(3))


def test_a_value_of_another_kind_is_an_error() -> None:
    with pytest.raises(BeartypeCallHintParamViolation, match="d_in"):
        linear("3", 4, Role.VALUE)


def test_a_field_of_another_kind_is_an_error() -> None:
    with pytest.raises(BeartypeCallHintParamViolation, match="d_model"):
        Dims(d_model="3", d_ff=1, layers=1, train_len=1, max_len=1)
