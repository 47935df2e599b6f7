"""ALI-DPFL beside fixed τ at equal budgets: Table II of arXiv 2308.10457 on Fashion-MNIST.

    FEDPACT_DATA=DIR python experiments/ali_dpfl/table2.py ROW MODEL [SEEDS] [OUT]

ROW: "fifth" for R_s = R_c/5 (ε = 2.75: 775 iterations, 155 rounds), "equal" for R_s = R_c
(ε = 1.75: 177 iterations, 177 rounds). MODEL: logistic, mlp or cnn. A folder that has been begun is
resumed, run by run.
"""

import sys
from pathlib import Path

import fedpact

HERE = Path(__file__).parent
# ε, R_c, R_s, and the values of τ that the paper's table has.
ROWS = {
    "fifth": (2.75, 775, 155, (1, 3, 5, 7, 9)),
    "equal": (1.75, 177, 177, (1, 2, 3, 4, 5)),
}


def plans(row: str, model: str) -> dict[str, fedpact.Plan]:
    """Return ALI's plan and those of fixed τ, each within R_c iterations and R_s rounds."""
    epsilon, iterations, rounds, fixed = ROWS[row]
    base = HERE / "fashion_mnist.toml"
    common = [f"model={model}", f"privacy.epsilon={epsilon}"]
    ali = [*common, f"rounds={rounds}", f"settings.iterations={iterations}"]
    found = {"ali": fedpact.Plan.read(base, ali)}
    for tau in fixed:
        within = min(rounds, iterations // tau)
        found[f"tau{tau}"] = fedpact.Plan.read(
            base,
            [
                *common,
                "algorithm=fedavg",
                f"rounds={within}",
                f"settings={{learning_rate = 0.5, local_steps = {tau}}}",
            ],
        )
    return found


if __name__ == "__main__":
    row, model = sys.argv[1:3]
    seeds = int(sys.argv[3]) if len(sys.argv) > 3 else 3
    out = Path(sys.argv[4]) if len(sys.argv) > 4 else Path("runs") / f"ali-{row}-{model}"
    result = fedpact.compare(
        plans(row, model), seeds, out, on_news=lambda news: print(news, flush=True)
    )
    print(out / "comparison.html")
