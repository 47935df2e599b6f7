"""LoRA on BERT, GPT-2 and T5 at ε = 4: is 47 words of Shakespeare from a comedy or not?

    FEDPACT_DATA=DIR python -m experiments.lora.run [KIND ...]      25 minutes of one core for all

Needs transformers and peft; nothing is downloaded. A text is 47 consecutive words, and its label is
whether the First Folio prints the play among the comedies. Of every five texts two are public. They
give the vocabulary and train a small base of each family, without labels: from two texts with every
second word hidden the base predicts the words of both. Two more are the records of two sites, and
the last one is the test set. Only LoRA's factors and the classifier are trained and sent.

One rule chooses the learning rate of each model, with and without privacy: for each of RATES train
on the first public fifth with seed 0 and the same plan, score on the second, keep the best (the
first of equals). No record of a site or of the test set is used, so this costs no privacy.

Every result is written to results.json at once, and is not computed again.
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
from experiments.made import made
from peft import LoraConfig, TaskType, get_peft_model

import fedpact

STORED = Path(__file__).with_name("results.json")
SEEDS = (0, 1, 2)
FIRST_COMEDY = "ARCHIDAMUS"
"""The first speaker of The Winter's Tale: from there on the file holds comedies only."""
WORDS, LENGTH = 1500, 48
PAD, MASK, OTHER, END = 0, 1, 2, 3
EPOCHS, FREQUENT = 30, 50
ADAPTED = {"BERT": ["query", "value"], "GPT-2": ["c_attn"], "T5": ["q", "v"]}
HEADS = {"BERT": "classifier", "GPT-2": "score", "T5": "classification_head"}
"""The layer that answers. PEFT knows the first two names by itself."""
TRAINED_ON = "the words of the public two fifths of the texts"
ROUNDS = 20
RATES = (0.1, 0.3, 1.0)
HOW = {"plain": None, "epsilon 4": 4.0}


def texts() -> tuple[list[list[str]], list[int]]:
    """Return texts of LENGTH - 1 words, and 1 for each that is from a comedy, else 0."""
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
    """Return tokens [n, LENGTH], the last one END, and labels."""
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
    """Return the weights of a base that was trained on pairs of public texts [n, LENGTH].

    Every second word is hidden, and the base predicts which words the two texts hold.
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
    """Return a classifier on a pretrained base, with LoRA's factors in its attention."""
    torch.manual_seed(seed)
    model = hf.AutoModelForSequenceClassification.from_config(config(kind))
    shapes = {n: v.shape for n, v in model.state_dict().items()}
    fit = {n: v for n, v in weights.items() if v.shape == shapes[n]}
    model.load_state_dict(fit, strict=False)
    lora = LoraConfig(
        r=4, target_modules=ADAPTED[kind], modules_to_save=[HEADS[kind]], task_type=TaskType.SEQ_CLS
    )
    return get_peft_model(model, lora)


def measure(
    kind: str, weights: Any, data: Any, epsilon: float | None, seed: int, rate: float
) -> dict[str, Any]:
    """Return the result of a run of two sites."""
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
            settings={"learning_rate": rate, "local_steps": 2},
            server={"optimiser": "momentum", "momentum": 0.9},
            run={"evaluate_every": 1000},
            initial={"trained_on": TRAINED_ON},
            privacy={"mode": "none"} if epsilon is None else private,
        )
        stored = (done.folder / "adapters" / "adapter_model.safetensors").exists()
    spent = done.summary.get("epsilon") or {}
    return {
        "accuracy": done.summary["accuracy"],
        "rate": rate,
        "epsilon": max(spent.values()) if spent else None,
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "adapters stored and merged alike": stored,
        "minutes": (time.process_time() - start) / 60,
        "made": made(),
    }


def main(kinds: list[str]) -> None:
    """Compute what is missing and print a table."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    ids, labels = tokenised()
    fifth = torch.arange(len(ids)) % 5

    def table(*fifths: int) -> dict[str, list[Any]]:
        rows = [i for i in range(len(ids)) if i % 5 in fifths]
        return {
            "input_ids": [ids[i].tolist() for i in rows],
            "label": [("other", "comedy")[labels[i]] for i in rows],
        }

    public = {"train": table(0), "test": table(1)}
    data = {"train": table(2, 3), "test": table(4)}
    tested = Counter(data["test"]["label"])
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    for kind in kinds or list(ADAPTED):
        weights: dict[str, torch.Tensor] = {}

        def once(name: str, *settings: Any, kind: str = kind, weights: Any = weights) -> float:
            if name not in stored:
                weights.update({} if weights else pretrain(kind, ids[fifth < 2]))
                stored[name] = measure(kind, weights, *settings)
                STORED.write_text(json.dumps(stored, indent=1) + "\n")
                print(name, stored[name], flush=True)
            return stored[name]["accuracy"]

        for how, epsilon in HOW.items():
            named = f"{kind}, {how}"
            scores = {r: once(f"{named}, rate {r:g}", public, epsilon, 0, r) for r in RATES}
            best = max(RATES, key=lambda rate: scores[rate])
            for seed in SEEDS:
                once(f"{named}, seed {seed}", data, epsilon, seed, best)
    counts = {part: len(columns["label"]) for part, columns in data.items()}
    print(f"majority {max(tested.values()) / sum(tested.values()):.3f}, {counts}")
    for kind in ADAPTED:
        for how in HOW:
            found = [stored[n] for s in SEEDS if (n := f"{kind}, {how}, seed {s}") in stored]
            if len(found) > 1:
                several = [one["accuracy"] for one in found]
                print(
                    f"| {kind} | {how} | {found[0]['rate']} | {statistics.mean(several):.3f} ± "
                    f"{statistics.stdev(several):.3f} | "
                    f"{statistics.mean(one['minutes'] for one in found):.1f} |"
                )


if __name__ == "__main__":
    main(sys.argv[1:])
