"""LoRA on BERT, GPT-2 and T5: comedy or not, told from 47 words of Shakespeare, at ε = 4.

    FEDPACT_DATA=DIR python experiments/lora/run.py [KIND ...]      15 minutes of one core for all

Needs transformers and peft; nothing is downloaded. A text is 47 words that follow each other in one
part of the file; it is of a comedy if the First Folio prints its play among them. Of five texts the
first two are public: their words are the vocabulary, and the base of each family, a small one, is
trained on them, without labels, to tell from a text of which every second word is hidden the words
of both. Two are the records of two sites, and the fifth tests. What is trained and sent is LoRA's
factors and the head. The run itself checks that they have gradients of each record and that the
base does not move, and at the end that the stored and the merged adapters answer as the trained
model (fedpact.models.adapters). Learning rates were chosen by one run at ε = 4 (BERT) and two
plain ones (BERT, GPT-2), all of seed 0.
Each result is stored as it comes (results.json) and not computed again.
"""

import json
import os
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from peft import LoraConfig, TaskType, get_peft_model

import fedpact

STORED = Path(__file__).with_name("results.json")
SEEDS = (0, 1, 2)
FIRST_COMEDY = "ARCHIDAMUS"
"""Who speaks first in The Winter's Tale: from there on the file has comedies alone."""
WORDS, LENGTH = 1500, 48
PAD, MASK, OTHER, END = 0, 1, 2, 3
EPOCHS, FREQUENT = 30, 50
ADAPTED = {"BERT": ["query", "value"], "GPT-2": ["c_attn"], "T5": ["q", "v"]}
TRAINED_ON = "the words of the public two fifths of the texts"
ROUNDS = 20
RATES = {None: 0.1, 4.0: 1.0}


def texts() -> tuple[list[list[str]], list[int]]:
    """Return texts of LENGTH - 1 words each, and whether each is of a comedy."""
    source = Path(os.environ["FEDPACT_DATA"]) / "shakespeare" / "input.txt"
    speeches = [s.strip().split(":\n", 1) for s in source.read_text().split("\n\n")]
    speeches = [s for s in speeches if len(s) == 2]
    start = [role for role, _ in speeches].index(FIRST_COMEDY)
    found, labels = [], []
    for comedy, part in enumerate((speeches[:start], speeches[start:])):
        words = [w for _, said in part for w in re.findall(r"[a-z']+", said.lower())]
        pieces = [words[i : i + LENGTH - 1] for i in range(0, len(words) - LENGTH, LENGTH - 1)]
        found += pieces
        labels += [comedy] * len(pieces)
    return found, labels


def tokenised() -> tuple[torch.Tensor, list[int]]:
    """Return tokens [n, LENGTH], the last of which ends the text, and labels."""
    found, labels = texts()
    public = Counter(w for i, text in enumerate(found) if i % 5 < 2 for w in text)
    place = {w: k for k, (w, _) in enumerate(public.most_common(WORDS - END - 1), END + 1)}
    ids = [[*(place.get(w, OTHER) for w in text), END] for text in found]
    return torch.tensor(ids), labels


def config(kind: str) -> Any:
    """Return a small configuration of a family."""
    named = {"vocab_size": WORDS, "pad_token_id": PAD, "bos_token_id": END, "eos_token_id": END}
    if kind == "BERT":
        return hf.BertConfig(
            **named, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=128, max_position_embeddings=LENGTH, num_labels=2,
        )  # fmt: skip
    if kind == "GPT-2":
        return hf.GPT2Config(
            **named, n_embd=64, n_layer=2, n_head=4, n_positions=LENGTH, num_labels=2
        )
    return hf.T5Config(
        **named, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, num_labels=2,
        decoder_start_token_id=PAD,
    )  # fmt: skip


def pretrain(kind: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the weights of a base that was trained on public texts [n, LENGTH], two by two.

    From a text of which every second word is hidden it is to tell the words of both texts.
    """
    torch.manual_seed(0)
    wide = config(kind)
    wide.num_labels = WORDS
    model = hf.AutoModelForSequenceClassification.from_config(wide).train()
    ids = ids[: len(ids) // 2 * 2]
    held = torch.zeros(len(ids), WORDS).scatter_(1, ids, 1.0)
    held[:, : END + FREQUENT] = 0
    wanted = held + held.view(-1, 2, WORDS).flip(1).reshape(-1, WORDS)
    wanted /= wanted.sum(1, keepdim=True).clamp_min(1)
    adam = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.05)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(ids)).split(32):
            hidden = (torch.rand(len(rows), LENGTH) < 0.5) & (ids[rows] > END)
            given = ids[rows].masked_fill(hidden, MASK)
            loss = -(model(input_ids=given).logits.log_softmax(1) * wanted[rows]).sum(1).mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
    return {n: v.detach().clone() for n, v in model.state_dict().items()}


def adapted(kind: str, weights: dict[str, torch.Tensor], seed: int) -> Any:
    """Return the family's classifier on a trained base, with LoRA's factors in its attention."""
    torch.manual_seed(seed)
    model = hf.AutoModelForSequenceClassification.from_config(config(kind))
    shapes = {n: v.shape for n, v in model.state_dict().items()}
    fit = {n: v for n, v in weights.items() if v.shape == shapes[n]}
    model.load_state_dict(fit, strict=False)
    lora = LoraConfig(r=4, target_modules=ADAPTED[kind], task_type=TaskType.SEQ_CLS)
    return get_peft_model(model, lora)


def measure(kind: str, epsilon: float | None, seed: int, weights: Any, data: Any) -> dict[str, Any]:
    """Return what a run of two sites comes to."""
    start = time.process_time()
    private = {"epsilon": epsilon, "delta": 1e-4, "clip": 0.5}
    model = adapted(kind, weights, seed)
    with tempfile.TemporaryDirectory() as folder:
        done = fedpact.run(
            model,
            data,
            label="label",
            out=Path(folder) / "run",
            sites=2,
            rounds=ROUNDS,
            sampling_rate=0.25,
            seed=seed,
            settings={"learning_rate": RATES[epsilon], "local_steps": 2},
            server={"optimiser": "momentum", "momentum": 0.9},
            run={"evaluate_every": 1000},
            initial={"trained_on": TRAINED_ON},
            privacy={"mode": "none"} if epsilon is None else private,
        )
        stored = (done.folder / "adapters" / "adapter_model.safetensors").exists()
    spent = done.summary.get("epsilon") or {}
    return {
        "accuracy": done.summary["accuracy"],
        "epsilon": max(spent.values()) if spent else None,
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "adapters stored and merged alike": stored,
        "minutes": (time.process_time() - start) / 60,
    }


def main(kinds: list[str]) -> None:
    """Compute what is missing and print a table."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    ids, labels = tokenised()
    fifth = torch.arange(len(ids)) % 5
    parts = {"train": (fifth == 2) | (fifth == 3), "test": fifth == 4}
    data = {
        part: {
            "input_ids": [ids[i].tolist() for i in rows.nonzero()[:, 0].tolist()],
            "label": [("other", "comedy")[labels[i]] for i in rows.nonzero()[:, 0].tolist()],
        }
        for part, rows in parts.items()
    }
    tested = Counter(data["test"]["label"])
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    stored["texts"] = {part: len(columns["label"]) for part, columns in data.items()}
    stored["majority"] = max(tested.values()) / sum(tested.values())
    for kind in kinds or list(ADAPTED):
        weights = None
        for epsilon in (None, 4.0):
            for seed in SEEDS:
                name = f"{kind}, {'plain' if epsilon is None else f'epsilon {epsilon:g}'}, {seed}"
                if name in stored:
                    continue
                weights = pretrain(kind, ids[fifth < 2]) if weights is None else weights
                stored[name] = measure(kind, epsilon, seed, weights, data)
                STORED.write_text(json.dumps(stored, indent=1) + "\n")
                print(name, stored[name], flush=True)
    print(f"majority {stored['majority']:.3f}, {stored['texts']}")
    for kind in ADAPTED:
        for how in ("plain", "epsilon 4"):
            found = [stored[n] for s in SEEDS if (n := f"{kind}, {how}, {s}") in stored]
            if len(found) > 1:
                several = [one["accuracy"] for one in found]
                print(
                    f"| {kind} | {how} | {statistics.mean(several):.3f} ± "
                    f"{statistics.stdev(several):.3f} | "
                    f"{statistics.mean(one['minutes'] for one in found):.1f} |"
                )


if __name__ == "__main__":
    main(sys.argv[1:])
