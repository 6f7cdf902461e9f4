"""The row-wise applications in PyTorch, eager and compiled, at the sizes that are timed; and the device's own ceilings.

Comes in: nothing. Goes out: milliseconds by case; a matrix product of 8192^3 in bfloat16 and a copy, which bound what the card
gives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from scripts.gpu.worker import Findings, failure, wait_for_turn

_SECONDS, _CALLS = 0.5, 8


def run(found: Findings, dry_run: bool) -> None:
    import torch

    torch.set_float32_matmul_precision("high")  # tf32, as XLA's default
    torch.manual_seed(0)
    device = "cpu" if dry_run else "cuda"
    cases = found.content["cases"] = {}
    made = []
    for name, make, rows in (("nerf", _nerf, 262_144), ("mgn", _mgn, 200_000), ("swiglu", _swiglu, 65_536)):
        for text, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
            rows = 64 if dry_run else rows

            def normal(*shape: int, scale: float = 1.0, dtype: Any = dtype) -> Any:
                return (torch.randn(*shape, device=device) * scale).to(dtype)

            function, weights, width = make(torch, normal)
            made.append((f"{name} {text} {rows}", function, weights, [normal(rows, width) for _ in range(4)]))
    compiled: dict[str, Callable[..., Any]] = {}
    for name, function, weights, inputs in [] if dry_run else made:
        try:
            with torch.no_grad():
                compiled[name] = torch.compile(function, dynamic=False)
                compiled[name](inputs[0], *weights)
        except Exception as error:
            compiled.pop(name, None)
            cases[name] = failure(error)
    wait_for_turn()
    for name, function, weights, inputs in made:
        with found.watch(name, 30.0):
            one = cases.setdefault(name, {})
            with torch.no_grad():
                for key, run_ in (("eager_ms", function), ("compile_ms", compiled.get(name))):
                    if run_ is not None:
                        one[key] = _milliseconds(torch, _with(run_, weights), inputs, dry_run)
            if "bf16" in name:
                one["train_eager_ms"] = _milliseconds(torch, _step(torch, function, weights, inputs), inputs, dry_run)
        found.write()
    if not dry_run:
        _ceilings(torch, found)


def _with(function: Callable[..., Any], weights: Sequence[Any]) -> Callable[[Any], Any]:
    return lambda x: function(x, *weights)


def _nerf(torch: Any, normal: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any], int]:
    ins, outs = (63, 256, 256, 256, 256 + 63, 256, 256, 256, 256), (256,) * 8 + (4,)
    weights = [normal(i, o, scale=(2 / i) ** 0.5) for i, o in zip(ins, outs, strict=True)] + [normal(o, scale=0.1) for o in outs]

    def function(x: Any, *weights: Any) -> Any:
        hidden = x
        for i in range(8):
            if i == 4:
                hidden = torch.cat([hidden, x], -1)
            hidden = torch.relu(torch.addmm(weights[9 + i], hidden, weights[i]))
        return torch.addmm(weights[17], hidden, weights[8])

    return function, weights, 63


def _mgn(torch: Any, normal: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any], int]:
    weights = [normal(384, 128, scale=0.07), normal(128), normal(128, 128, scale=0.12), normal(128), normal(128), normal(128)]

    def function(x: Any, w0: Any, b0: Any, w1: Any, b1: Any, gain: Any, shift: Any) -> Any:
        hidden = torch.addmm(b1, torch.relu(torch.addmm(b0, x, w0)), w1)
        return x[:, :128] + torch.nn.functional.layer_norm(hidden, (128,), gain, shift)

    return function, weights, 384


def _swiglu(torch: Any, normal: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any], int]:
    weights = [normal(512), normal(512, 1408, scale=0.06), normal(512, 1408, scale=0.06), normal(1408, 512, scale=0.04)]

    def function(x: Any, gain: Any, gate: Any, up: Any, down: Any) -> Any:
        hidden = torch.nn.functional.rms_norm(x, (512,), gain, 1e-6)
        return x + (torch.nn.functional.silu(hidden @ gate) * (hidden @ up)) @ down

    return function, weights, 512


def _step(torch: Any, function: Callable[..., Any], weights: Sequence[Any], inputs: Sequence[Any]) -> Callable[[Any], None]:
    """A training step with Adam on the mean squared error."""
    mine = [w.detach().clone().requires_grad_() for w in weights]
    optimizer = torch.optim.Adam(mine, fused=mine[0].is_cuda)
    target = torch.randn_like(function(inputs[0], *mine)).float()

    def step(x: Any) -> None:
        ((function(x, *mine).float() - target) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _milliseconds(torch: Any, run_: Callable[[Any], Any], inputs: Sequence[Any], dry_run: bool) -> float:
    """Median over rounds of queued calls."""
    times: list[float] = []
    end = time.monotonic() + (0.0 if dry_run else _SECONDS)
    wait = (lambda: None) if dry_run else torch.cuda.synchronize
    for x in inputs:
        run_(x)
    wait()
    while time.monotonic() < end or len(times) < 3:
        began = time.perf_counter()
        for k in range(_CALLS):
            run_(inputs[k % len(inputs)])
        wait()
        times.append(1e3 * (time.perf_counter() - began) / _CALLS)
    return sorted(times)[len(times) // 2]


def _ceilings(torch: Any, found: Findings) -> None:
    with found.watch("ceilings", 30.0), torch.no_grad():
        lstm = torch.nn.LSTM(256, 256).to("cuda", torch.bfloat16)
        steps = torch.randn(128, 256, 256, device="cuda").to(torch.bfloat16)
        found.content["cases"]["lstm_256 bf16 256"] = {"cudnn_ms": _milliseconds(torch, lstm, [steps], False)}
        a, b = (torch.randn(8192, 8192, device="cuda").to(torch.bfloat16) for _ in range(2))
        found.content["gemm_tflops"] = 2 * 8192**3 / _milliseconds(torch, lambda x: x @ b, [a], False) / 1e9
        source = torch.empty(1 << 30, device="cuda", dtype=torch.int8)
        target = torch.empty_like(source)
        found.content["copy_tbs"] = 2 * (1 << 30) / _milliseconds(torch, lambda x: target.copy_(x), [source], False) / 1e9
