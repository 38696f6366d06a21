"""Draw the committed results of benchmarks/cpu.py: tokens per second of each engine, for one sequence.

    python benchmarks/chart.py benchmarks/results/cpu.svg

Each bar is the median of all processes. Engines are grouped by the width of the weights; int8 and int4 of this project
round activations to 8 bits too, as the other engines do.
"""

import argparse
import json
import statistics
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
MODELS = {"GPT-2 124M": "cpu-gpt2.json", "Llama-3.2-1B": "cpu-llama.json"}
FORMATS = {
    "bf16": {"bf16"},
    "int8": {"s8 a8", "int8", "q8_0", "int8 b32"},
    "int4": {"s4 g32 a8", "int4 g32", "q4_0", "int4 b32"},
}
ENGINES = {
    "ours": ("this project", "#d9480f"),
    "llama.cpp": ("llama.cpp", "#4c6ef5"),
    "openvino": ("OpenVINO GenAI", "#7048e8"),
    "onnxruntime-genai": ("onnxruntime-genai", "#1098ad"),
    "ctranslate2": ("CTranslate2", "#74b816"),
    "vllm": ("vLLM", "#f59f00"),
    "compile": ("Transformers, compiled", "#868e96"),
    "eager": ("Transformers, eager", "#ced4da"),
}


def rates(path):
    """Tokens per second by width and engine."""
    seconds = {}
    for run in json.loads(path.read_text())["runs"]:
        if run.get("rows") == 1 and (token := run["token"].get("short")):
            seconds.setdefault((run["engine"], run["format"]), []).append(token)
    return {
        width: {
            engine: 1 / statistics.median(times)
            for (engine, format), times in seconds.items()
            if format in formats and engine in ENGINES
        }
        for width, formats in FORMATS.items()
    }


def draw(path):
    matplotlib.rcParams["svg.hashsalt"] = "cpu"  # the same picture again is the same file
    figure = Figure(figsize=(9, 5.4), layout="constrained", facecolor="white")
    for axes, (title, file) in zip(figure.subplots(1, len(MODELS)), MODELS.items(), strict=True):
        place, ticks = 0.0, []
        for width, found in rates(RESULTS / file).items():
            began = place
            for engine in filter(found.get, ENGINES):
                label, color = ENGINES[engine]
                axes.barh(place, found[engine], 0.8, color=color)
                weight = "bold" if engine == "ours" else "normal"
                axes.annotate(
                    f"{label} {found[engine]:.3g}",
                    (found[engine], place),
                    xytext=(3, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                    fontweight=weight,
                )
                place += 1
            ticks.append(((began + place - 1) / 2, width))
            place += 0.8
        axes.set_yticks([y for y, _ in ticks], [width for _, width in ticks])
        axes.set(title=title, xlabel="tokens per second, one sequence")
        axes.set_xlim(0, axes.get_xlim()[1] * 1.35)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="the picture to write, .svg or .png")
    draw(parser.parse_args().path)
