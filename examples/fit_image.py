"""Fit a photograph with a coordinate network, its loss and its gradient running as spatial pipelines.

    python examples/fit_image.py                 # about two minutes on two cores; Ctrl-C ends with what was reached
    python examples/fit_image.py --size 256 --steps 200

The photograph is NASA's portrait of Eileen Collins (public domain), which ships inside the scikit-image wheel. The network is a
NeRF-like one: random Fourier features (Tancik et al. 2020, arXiv:2006.10739), eight ReLU layers of 256 with the features
concatenated again after the fourth, and a sigmoid head. Blocks of steps take turns between three ways to write the step, on one and
the same training state, so all are timed under the same conditions and no step is wasted:

* "pipelined loss", ``jax.value_and_grad(kj.pipeline(loss))``: forward and backward are a pipeline each, activations are saved;
* "pipelined whole", ``kj.pipeline(jax.value_and_grad(loss))``: forward, loss and backward are one pipeline, and nothing is saved;
* "jax.jit", ``jax.value_and_grad(loss)``.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from PIL import Image, ImageDraw
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from skimage.data import astronaut

import kitsune_jax as kj

WIDTH, DEPTH, SKIP_AFTER, FREQUENCIES = 256, 8, 4, 64
BANDWIDTH = 8.0  # standard deviation of the random frequencies, in cycles per image
Params = dict[str, Any]


def photograph(size: int) -> np.ndarray:
    """``[size, size, 3]`` float32 in 0..1."""
    picture = Image.fromarray(astronaut()).resize((size, size), Image.Resampling.LANCZOS)
    return np.asarray(picture, np.float32) / 255.0


def pixel_grid(size: int) -> np.ndarray:
    """``[size * size, 2]`` pixel centres in 0..1, row by row."""
    centres = (np.arange(size, dtype=np.float32) + 0.5) / size
    return np.stack(np.meshgrid(centres, centres, indexing="ij"), -1).reshape(-1, 2)


def initial_params(key: jax.Array) -> Params:
    """He-initialised layers and the (fixed) random frequencies."""
    features = 2 * FREQUENCIES
    inputs = [features] + [WIDTH + features * (i == SKIP_AFTER) for i in range(1, DEPTH)] + [WIDTH]
    outputs = [WIDTH] * DEPTH + [3]
    *layer_keys, key = jax.random.split(key, DEPTH + 2)
    return {
        "layers": [
            (jax.random.normal(k, (m, n)) * (2.0 / m) ** 0.5, jnp.zeros(n))
            for k, m, n in zip(layer_keys, inputs, outputs, strict=True)
        ],
        "frequencies": jax.random.normal(key, (2, FREQUENCIES)) * BANDWIDTH,
    }


def network(params: Params, coordinates: jax.Array) -> jax.Array:
    """Colours ``[rows, 3]`` at ``coordinates`` ``[rows, 2]``."""
    angles = 2.0 * jnp.pi * coordinates @ jax.lax.stop_gradient(params["frequencies"])
    features = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    *hidden, (w_out, b_out) = params["layers"]
    h = features
    for i, (w, b) in enumerate(hidden):
        if i == SKIP_AFTER:
            h = jnp.concatenate([h, features], axis=-1)
        h = jax.nn.relu(h @ w + b)
    return jax.nn.sigmoid(h @ w_out + b_out)


def squared_error(params: Params, coordinates: jax.Array, colours: jax.Array) -> jax.Array:
    """Mean squared error of the network on a batch of pixels."""
    return jnp.mean((network(params, coordinates) - colours) ** 2)


@dataclasses.dataclass
class Variant:
    """One way to run the training step, and the seconds per step that its blocks took."""

    name: str
    step: Callable[..., Any]
    compile_seconds: float
    seconds_per_step: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Fit:
    params: Params
    steps: int
    variants: tuple[Variant, ...]
    ended_by: str


def compiled_step(
    name: str, value_and_grad: Callable[..., Any], optimiser: optax.GradientTransformation, example: tuple[Any, ...]
) -> Variant:
    """One optimiser step on ``value_and_grad``, compiled ahead of time."""

    def step(params: Params, state: Any, coordinates: jax.Array, colours: jax.Array) -> tuple[Params, Any, jax.Array]:
        value, grads = value_and_grad(params, coordinates, colours)
        updates, state = optimiser.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    start = time.perf_counter()
    compiled = jax.jit(step).lower(*example).compile()
    return Variant(name, compiled, time.perf_counter() - start)


def fit(picture: np.ndarray, *, steps: int, rows: int, block: int, seconds: float, seed: int, console: Console) -> Fit:
    """Train for ``steps`` steps of ``rows`` pixels, or ``seconds``; the variants take turns every ``block`` steps."""
    coordinates, colours = pixel_grid(len(picture)), picture.reshape(-1, 3)
    rng = np.random.default_rng(seed)
    params = initial_params(jax.random.key(seed))
    optimiser = optax.adam(optax.warmup_cosine_decay_schedule(0.0, 2e-3, steps // 20, max(steps, 2), end_value=4e-5))
    state = optimiser.init(params)

    def batch() -> tuple[np.ndarray, np.ndarray]:
        chosen = rng.integers(len(colours), size=rows)
        return coordinates[chosen], colours[chosen]

    console.print("compiling the pipelined steps and the plain jax.jit step ...")
    example = (params, state, *batch())
    variants = (
        compiled_step("pipelined loss", jax.value_and_grad(kj.pipeline(squared_error)), optimiser, example),
        compiled_step("pipelined whole", kj.pipeline(jax.value_and_grad(squared_error)), optimiser, example),
        compiled_step("jax.jit", jax.value_and_grad(squared_error), optimiser, example),
    )
    for variant in variants:
        jax.block_until_ready(variant.step(*example))  # page in what a first call pages in; the result is thrown away

    done, ended_by, start = 0, "all steps done", time.perf_counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("fitting", total=steps)
        try:
            while done < steps:
                variant = variants[(done // block) % len(variants)]
                batches = [batch() for _ in range(min(block, steps - done))]
                began = time.perf_counter()
                for b in batches:
                    params, state, value = variant.step(params, state, *b)
                    done += 1
                jax.block_until_ready(value)
                variant.seconds_per_step.append((time.perf_counter() - began) / len(batches))
                progress.update(task, completed=done, description=f"fitting, {-10 * np.log10(float(value)):.1f} dB")
                if time.perf_counter() - start > seconds:
                    ended_by = f"time limit of {seconds:.0f} s"
                    break
        except KeyboardInterrupt:
            ended_by = "interrupted"
    return Fit(params, done, variants, ended_by)


def signal_to_noise(a: np.ndarray, b: np.ndarray) -> float:
    """PSNR in dB of two pictures in 0..1."""
    return float(-10 * np.log10(np.mean((a.astype(np.float64) - b) ** 2)))


def write_side_by_side(path: Path, original: np.ndarray, fitted: np.ndarray) -> None:
    """Original, fit and four times their difference, next to each other with a caption each."""
    panels = {"original": original, "fitted": fitted, "difference x 4": np.clip(4 * np.abs(original - fitted), 0, 1)}
    size, caption = len(original), 16
    sheet = Image.new("RGB", (len(panels) * size, size + caption), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (name, panel) in enumerate(panels.items()):
        sheet.paste(Image.fromarray(np.uint8(np.round(255 * panel))), (i * size, caption))
        draw.text((i * size + 4, 2), name, fill="black")
    sheet.save(path)


def speed_table(variants: Sequence[Variant]) -> Table:
    table = Table(title="steps per second, interleaved blocks")
    for column in ("step", "median", "slowest", "fastest", "blocks", "compile"):
        table.add_column(column, justify="left" if column == "step" else "right")
    for v in variants:
        rates = [1 / s for s in v.seconds_per_step]
        numbers = (statistics.median(rates), min(rates), max(rates)) if rates else (float("nan"),) * 3
        table.add_row(v.name, *(f"{n:.2f}" for n in numbers), str(len(rates)), f"{v.compile_seconds:.1f} s")
    return table


def speedup(pipelined: Variant, plain: Variant) -> str:
    """Median and range of the ratio of neighbouring blocks."""
    ratios = [b / a for a, b in zip(pipelined.seconds_per_step, plain.seconds_per_step, strict=False)]
    if not ratios:
        return "too few blocks to compare"
    return f"{pipelined.name} / jax.jit: {statistics.median(ratios):.2f}x (blocks {min(ratios):.2f}x to {max(ratios):.2f}x)"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--size", type=int, default=512, help="edge of the picture in pixels (default 512)")
    parser.add_argument("--rows", type=int, default=8192, help="pixels per step (default 8192)")
    parser.add_argument("--steps", type=int, default=400, help="training steps (default 400)")
    parser.add_argument("--block", type=int, default=10, help="steps per timed block (default 10)")
    parser.add_argument("--seconds", type=float, default=120.0, help="stop training after this long (default 120)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the data (default 0)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/fit_image.png"), help="the picture to write (default out/fit_image.png)"
    )
    args = parser.parse_args(argv)
    if min(args.size, args.rows, args.steps, args.block) < 1:
        parser.error("--size, --rows, --steps and --block must be at least 1")
    if args.out.suffix.lower() not in Image.registered_extensions():
        parser.error(f"--out {args.out} must be the name of a picture, as fit_image.png")
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out}: there is no such folder, and it cannot be made: {error.strerror}")

    console = Console()
    picture = photograph(args.size)
    console.print(f"fitting a {args.size} x {args.size} photograph on {jax.devices()[0].platform}, {args.rows} pixels a step")
    result = fit(picture, steps=args.steps, rows=args.rows, block=args.block, seconds=args.seconds, seed=args.seed, console=console)

    everything = pixel_grid(args.size)
    fitted = np.asarray(jax.jit(kj.pipeline(network))(result.params, everything)).reshape(picture.shape)
    write_side_by_side(args.out, picture, fitted)
    example = (result.params, everything[: args.rows], picture.reshape(-1, 3)[: args.rows])
    console.print("\nwhat was pipelined of the loss and its gradient:\n")
    print(kj.explain(jax.value_and_grad(kj.pipeline(squared_error)))(*example), end="\n\n")  # rich would wrap its lines
    console.print("and where the whole gradient is pipelined:\n")
    print(kj.explain(jax.value_and_grad(squared_error))(*example), end="\n\n")
    console.print(speed_table(result.variants))
    *pipelined, plain = result.variants
    for variant in pipelined:
        console.print(speedup(variant, plain), highlight=False)
    console.print(
        f"PSNR {signal_to_noise(picture, fitted):.2f} dB after {result.steps} steps ({result.ended_by}); see {args.out}",
        highlight=False,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
