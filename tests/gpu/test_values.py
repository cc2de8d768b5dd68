"""Values that live on a GPU."""

from __future__ import annotations

import pytest
import torch

from air_magic import values

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_tensors_of_a_gpu_arrive_on_the_cpu(tmp_path):
    """Sharing, parameters and sparse tensors included."""
    path = tmp_path / "value"
    base = torch.arange(float(1 << 20), device="cuda")
    model = torch.nn.Linear(2, 2, device="cuda")
    value = {"base": base, "view": base[1:3], "model": model, "coo": torch.eye(3, device="cuda").to_sparse()}
    values.dump(value, path)
    loaded, warnings = values.load(path)
    assert warnings == []
    loaded["base"][1] = 7
    tensors = [loaded["base"], loaded["view"], loaded["model"].weight, loaded["coo"]]
    assert [tensor.device.type for tensor in tensors] == ["cpu"] * 4
    assert (loaded["view"][0], torch.equal(loaded["model"].weight, model.weight.cpu())) == (7, True)
    assert torch.equal(loaded["coo"].to_dense(), torch.eye(3))
