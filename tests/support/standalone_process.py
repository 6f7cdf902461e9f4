"""``python -m tests.support.standalone_process FOLDER``: evaluates the Graphs that lie in a folder, and knows nothing else of them.

Comes in: files ``NAME.json`` (a list of a target, ``force``, and the text of a Graph), and ``NAME.in`` (the bytes of its inputs).
Goes out: ``NAME.out``, the bytes of its outputs, and ``NAME.calls``, how many custom calls the program holds.
"""

from __future__ import annotations

import json
import pathlib
import pickle
import sys
import traceback

import jax

from reference.standalone import as_function, from_json


def main(folder: pathlib.Path) -> None:
    for path in sorted(folder.glob("*.json")):
        try:
            target, force, text = json.loads(path.read_text())
            graph = from_json(text)
            jax.config.update("jax_enable_x64", any(v.dtype in ("float64", "int64", "uint64") for v in graph.values))
            compiled = jax.jit(as_function(graph, target, force=force, strict=True))
            arrays = pickle.loads(path.with_suffix(".in").read_bytes())
            lowered = compiled.lower(*arrays)
            outs = lowered.compile()(*arrays)
            path.with_suffix(".calls").write_text(str(lowered.as_text().count("@kitsune_")))
            path.with_suffix(".out").write_bytes(pickle.dumps(jax.device_get(outs)))
        except Exception:
            path.with_suffix(".error").write_text(traceback.format_exc())


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
