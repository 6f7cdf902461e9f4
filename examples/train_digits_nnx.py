"""Train a classifier of handwritten digits with flax nnx, its loss and its gradient as spatial pipelines.

    python examples/train_digits_nnx.py                       # a few seconds; Ctrl-C ends with a checkpoint
    python examples/train_digits_nnx.py --steps 2000 --resume # goes on from there
    python examples/train_digits_nnx.py --compare             # runs the same steps without pipelines, too

The step is the one of flax's guides, with ``nnx.value_and_grad(kj.pipeline(loss_fn))`` in it. A module is a pytree, so a pipelined
function takes it as it is. But it gets a copy: what it changes in the module (batch statistics, random states) does not come out.
The digits are the 8 x 8 pictures of Alpaydin and Kaynak (1998), which ship inside the scikit-learn wheel. They are few and small:
whether pipelines gain here is the cost model's choice, told at the end.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import _training as training
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from sklearn.datasets import load_digits

import kitsune_jax as kj

HELD_OUT = 297  # of 1 797 pictures


class Block(nnx.Module):
    """A residual block: normalise, widen, gate, narrow."""

    def __init__(self, width: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.silu(self.up(self.norm(x))))


class Classifier(nnx.Module):
    """``dtype`` is what the layers compute in; their parameters are float32."""

    def __init__(self, width: int, depth: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        self.inputs = nnx.Linear(64, width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(width, dtype=dtype, rngs=rngs) for _ in range(depth)])
        self.outputs = nnx.Linear(width, 10, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        return self.outputs(x).astype(jnp.float32)


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """(pictures ``[n, 64]`` in 0..1, labels ``[n]``) to train on, and the same held out."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x, y = (data.data[order] / 16).astype(np.float32), data.target[order].astype(np.int32)
    return (x[HELD_OUT:], y[HELD_OUT:]), (x[:HELD_OUT], y[:HELD_OUT])


def loss_fn(model: Classifier, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def make_train_step(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The training step on ``loss_fn``, pipelined or not."""

    @nnx.jit
    def train_step(model: Classifier, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
        optimizer.update(model, grads)
        return loss

    return train_step


def create(settings: dict[str, Any]) -> tuple[Classifier, nnx.Optimizer]:
    model = Classifier(settings["width"], depth=2, dtype=jnp.dtype(settings["dtype"]), rngs=nnx.Rngs(settings["seed"]))
    # The schedule does not depend on --steps, so a finished run can be prolonged.
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0.0, 1e-3, transition_steps=20)))
    return model, nnx.Optimizer(model, optimiser, wrt=nnx.Param)


def save(manager: ocp.CheckpointManager, settings: dict[str, Any], losses: Sequence[Any], trained: tuple[Any, ...]) -> None:
    """Both the model and the optimiser; the manager writes in the background and keeps the latest two."""
    info = {"settings": settings, "losses": [float(x) for x in losses]}
    parts = ocp.args.Composite(state=ocp.args.StandardSave(nnx.state(trained)), info=ocp.args.JsonSave(info))
    if len(losses) != manager.latest_step():
        manager.save(len(losses), args=parts)


def restore(manager: ocp.CheckpointManager, settings: dict[str, Any], trained: tuple[Any, ...]) -> list[Any]:
    """Bring model and optimiser to the latest checkpoint, and return the losses so far."""
    latest = manager.latest_step()
    if latest is None:
        raise SystemExit(f"cannot resume: there is no checkpoint in {manager.directory}")
    info = manager.restore(latest, args=ocp.args.Composite(info=ocp.args.JsonRestore())).info
    training.check_same(settings, info["settings"])  # first: the arrays of another width would not fit
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.state(trained))
    nnx.update(trained, manager.restore(latest, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))).state)
    losses: list[Any] = info["losses"]
    return losses


def fit(
    step: Callable[..., Any],
    trained: tuple[Classifier, nnx.Optimizer],
    losses: list[Any],
    batches: training.Batches,
    until: int,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Train from step ``len(losses)`` on, and append the losses."""
    on_trained = nnx.cached_partial(step, *trained)  # walks through the modules once, not in each step
    for i in training.steps(losses, until):
        losses.append(on_trained(*batches[i]))
        after_step()


def compare(losses: Sequence[Any], settings: dict[str, Any], batches: training.Batches) -> str:
    """The same steps without pipelines, and once more with the initial weights rounded."""
    plain: list[Any] = []
    rounded: list[Any] = []
    step = make_train_step(loss_fn)
    fit(step, create(settings), plain, batches, len(losses))
    model, optimizer = create(settings)
    nnx.update(model, training.nudged(nnx.state(model, nnx.Param), settings["dtype"], settings["seed"]))
    fit(step, (model, optimizer), rounded, batches, len(losses))
    return training.comparison(losses, plain, rounded)


def main(argv: Sequence[str] | None = None) -> int:
    options = training.parser(__doc__ or "", out="out/digits_nnx", steps=300, batch=500)
    options.add_argument("--width", type=int, default=128, help="of the residual stream (default 128)")
    args = training.parse(options, argv)
    settings = {name: getattr(args, name) for name in ("seed", "batch", "dtype", "width")}
    train, (x, y) = digits()
    batches = training.Batches(train, args.batch, args.seed)
    folder = args.out.absolute() / "checkpoints"
    if not args.resume:
        shutil.rmtree(folder, ignore_errors=True)  # the manager takes no step that is older than one it has

    model, optimizer = create(settings)
    train_step = make_train_step(kj.pipeline(loss_fn, force=args.force or None))
    losses: list[Any] = []
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        if args.resume:
            losses = restore(manager, settings, (model, optimizer))

        def after_step() -> None:
            if len(losses) % args.save_every == 0:
                save(manager, settings, losses, (model, optimizer))

        fit(train_step, (model, optimizer), losses, batches, args.steps, after_step)
        save(manager, settings, losses, (model, optimizer))
    training.draw_curve(args.out / "loss.png", losses, "digits, flax nnx")

    accuracy = nnx.metrics.Accuracy()
    accuracy.update(logits=nnx.jit(lambda model, x: model(x))(model, x), labels=jnp.asarray(y))
    print(training.ending(losses, args, f"accuracy {accuracy.compute():.1%} on {len(y)} digits that it never saw"))
    print(training.outcome(kj.explain(train_step)(model, optimizer, *batches[0])))
    if args.compare:
        print(compare(losses, settings, batches))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
