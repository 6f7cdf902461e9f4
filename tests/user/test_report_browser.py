"""A saved report in a real browser, headless: its pictures have their texts inside of them, in light and in dark."""

from __future__ import annotations

import html
import json
import pathlib
import re
import shutil
import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest

import kitsune_jax as kj

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium")

# For each text the name of what it sticks out of, if it does: the picture, or the box that holds its first point.
MEASURE = """
<script>
const out = [];
for (const svg of document.querySelectorAll("svg")) {
  const view = svg.viewBox.baseVal;
  const boxes = [...svg.querySelectorAll("rect")].map(r => r.getBBox());
  for (const text of svg.querySelectorAll("text")) {
    const b = text.getBBox(), at = {x: b.x + 1, y: b.y + b.height / 2};
    const box = boxes.find(r => at.x >= r.x && at.x <= r.x + r.width && at.y >= r.y && at.y <= r.y + r.height);
    if (b.x < 0 || b.x + b.width > view.width || b.y + b.height > view.height) out.push(["picture", text.textContent]);
    if (box && b.x + b.width > box.x + box.width) out.push(["box", text.textContent]);
  }
}
const told = document.createElement("pre");
told.id = "measured";
told.textContent = JSON.stringify({out, texts: document.querySelectorAll("svg text").length});
document.body.appendChild(told);
</script>
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The report of a gradient for a GPU, whose plan has several stages and phases, and of one for a CPU."""

    def loss(w: Any, x: Any) -> Any:
        y = x
        for _ in range(4):
            y = jnp.tanh(y @ w)
        return jnp.mean(y * y)

    step = jax.value_and_grad(loss)
    w, x = jnp.ones((256, 256), jnp.bfloat16), jnp.ones((65536, 256), jnp.bfloat16)
    gpu = kj.explain(step, platform="cuda", device="h200", force=True)(w, x)
    cpu = kj.explain(step, platform="cpu", device="avx512-8", force=True)(w, x)
    assert gpu.regions and cpu.regions
    path = tmp_path_factory.mktemp("browser") / "plan.html"
    gpu.save(path)
    other = path.with_name("cpu.html")
    cpu.save(other)
    body = re.search(r"<body>(.*)</body>", other.read_text(encoding="utf-8"), re.S)
    assert body is not None
    path.write_text(path.read_text(encoding="utf-8").replace("</body>", body.group(1) + MEASURE + "</body>"), encoding="utf-8")
    return path


def chromium(*words: str) -> str:
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_texts_stay_inside_of_their_boxes(page: pathlib.Path) -> None:
    dom = chromium("--dump-dom", page.as_uri())
    found = re.search(r'<pre id="measured">(.*?)</pre>', dom, re.S)
    assert found is not None
    measured = json.loads(html.unescape(found.group(1)))
    assert measured["texts"] > 40
    assert measured["out"] == []


def test_light_and_dark_show_the_same_picture(page: pathlib.Path) -> None:
    """Screenshots of the two: the dark one has a dark ground, and ink where the light one has ink."""
    images = []
    for scheme in ("light", "dark"):
        styled = page.with_name(f"{scheme}.html")
        text = page.read_text(encoding="utf-8").replace("color-scheme:light dark", f"color-scheme:{scheme}")
        styled.write_text(text, encoding="utf-8")
        shot = styled.with_suffix(".png")
        chromium(f"--screenshot={shot}", "--window-size=1050,1600", styled.as_uri())
        with PIL.Image.open(shot) as image:
            images.append(np.asarray(image.convert("L")).astype(int))
    light, dark = images
    assert light.shape == dark.shape
    ground_light, ground_dark = np.bincount(light.ravel()).argmax(), np.bincount(dark.ravel()).argmax()
    assert ground_light > 240 and ground_dark < 60
    ink_light, ink_dark = abs(light - ground_light) > 60, abs(dark - ground_dark) > 60
    assert ink_light.mean() > 0.01
    assert (ink_light & ink_dark).sum() > 0.7 * ink_light.sum()
