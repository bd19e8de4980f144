"""Numeric precision inside ops that choose their own."""

from contextlib import AbstractContextManager, nullcontext

import torch


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """A context without autocast; devices that have none (such as 'meta') have nothing to switch off."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
