"""A process that runs one application in PyTorch on the CPU: ``python -m benchmarks.peers.worker FOLDER``.

Comes in: ``FOLDER`` with ``case.json`` and arrays (``client`` writes both); orders on standard input, one JSON object a line.
Goes out: an answer a line on standard output. Orders: ``{"run": COLUMN, "calls": N}``, answered by the seconds of a call;
``{"result": COLUMN}``, by the file of the column's result, or of its loss and gradients in a training step. Columns: "torch",
"torch_compile". The process ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers import networks

Run = Callable[[], Any]


def main(folder: Path) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever PyTorch and the compilers print is no answer
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    case = json.loads((folder / "case.json").read_text())
    arrays = {name: _tensor(folder / f"{name}.npy", dtype) for name, dtype in case["arrays"].items()}
    params = {name.removeprefix("params."): a for name, a in arrays.items() if name.startswith("params.")}
    network = networks.make(case["app"], params, [arrays[f"inputs.{k}"] for k in range(case["inputs"])])
    compiled = torch.compile(network.function, dynamic=False)
    columns = {"torch": network.function, "torch_compile": compiled}
    training = case["mode"] == "train"
    made = {c: _Step(network, f, arrays["targets"], case["loss"]) if training else _Forward(network, f) for c, f in columns.items()}
    print(json.dumps({"version": torch.__version__, "threads": torch.get_num_threads()}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "result" in order:
            np.savez(folder / "result.npz", allow_pickle=False, **made[order["result"]].result())
            answer: dict[str, Any] = {"file": "result.npz"}
        else:
            answer = {"seconds": _seconds(made[order["run"]], order["calls"])}
        print(json.dumps(answer), file=answers, flush=True)


def _seconds(run: Run, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def _tensor(path: Path, dtype: str) -> Tensor:
    array = np.load(path)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if dtype == "bfloat16" else torch.from_numpy(array)


class _Forward:
    def __init__(self, network: networks.Network, function: Callable[..., Tensor]):
        self.network, self.function = network, function

    @torch.no_grad()
    def __call__(self) -> Tensor:
        return self.function(self.network.leaves, *self.network.inputs)

    def result(self) -> dict[str, np.ndarray]:
        return {"result": self().double().numpy()}


class _Step:
    """Forward, loss, backward and Adam, whose moments have the parameters' dtype, as PyTorch has them."""

    def __init__(self, network: networks.Network, function: Callable[..., Tensor], targets: Tensor, loss: str):
        self.network, self.function, self.targets, self.loss = network, function, targets, _LOSSES[loss]
        self.leaves = tuple(a.requires_grad_() for a in network.leaves)
        self.adam = torch.optim.Adam(self.leaves, fused=True)

    def __call__(self) -> Tensor:
        loss = self._differentiate()
        self.adam.step()
        return loss

    def _differentiate(self) -> Tensor:
        self.adam.zero_grad()
        loss = self.loss(self.function(self.leaves, *self.network.inputs), self.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def result(self) -> dict[str, np.ndarray]:
        loss = self._differentiate().item()
        grads = self.network.gradients([leaf.grad.double() for leaf in self.leaves if leaf.grad is not None])
        return {"loss": np.float64(loss), **{f"grad.{name}": g.numpy() for name, g in grads.items()}}


_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squared_error": lambda out, y: F.mse_loss(out.float(), y.float()),
    "label_error": lambda out, y: F.cross_entropy(out, y.long()),
}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
