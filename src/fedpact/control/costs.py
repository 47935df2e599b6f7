"""What the rounds of a run have cost: bytes and seconds, split into what a round and a step take.

A controller of τ asks how many rounds of τ local iterations the communication budget still allows.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Costs:
    """Sums over the rounds so far. steps: Σ τ. squares: Σ τ². products: Σ τ times seconds."""

    rounds: int = 0
    sent: int = 0
    seconds: float = 0.0
    steps: int = 0
    squares: int = 0
    products: float = 0.0

    def after(self, sent: int, steps: int, seconds: float) -> "Costs":
        """Return the costs with one more round of `steps` local iterations."""
        return replace(
            self,
            rounds=self.rounds + 1,
            sent=self.sent + sent,
            seconds=self.seconds + seconds,
            steps=self.steps + steps,
            squares=self.squares + steps**2,
            products=self.products + steps * seconds,
        )

    def split_seconds(self) -> tuple[float, float]:
        """Return (d_com, d_cmp): seconds of a round beside its steps, and of one local iteration.

        Least squares of seconds = d_com + d_cmp τ, both kept >= 0. As long as all rounds had one τ
        they cannot be told apart, and everything counts as d_com: a larger τ is tried, and tells.
        """
        if not self.rounds:
            return 0.0, 0.0
        mean_seconds, mean_steps = self.seconds / self.rounds, self.steps / self.rounds
        # Whole numbers, so that equal τ give exactly 0.
        spread = self.rounds * self.squares - self.steps**2
        if spread == 0:
            return mean_seconds, 0.0
        slope = (self.rounds * self.products - self.steps * self.seconds) / spread
        per_step = min(max(slope, 0.0), mean_seconds / mean_steps)
        return mean_seconds - per_step * mean_steps, per_step
