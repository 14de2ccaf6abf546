"""How many tokens of a sample the next round drafts, or the target samples without a draft."""

import math

from tinkercloud.proxy.round_costs import RoundCosts

FIRST_DRAFTED, FIRST_PLAIN = 8, 4
MOST_PLAIN = 64
MISSES = 3
ASSUMED = (2.0, 0.5)  # accepted and rejected tokens, of a sample that nothing is known of yet
MEMORY = 0.8  # of a sample's earlier rounds, with each
SMALL = 0.1  # of a request: what need not be saved


class RoundLength:
    """Of one sample. most: drafted tokens of a round.

    By what requests take (`costs`) and by the sample's own acceptance a round drafts as many tokens
    as give the most for their time; where the target alone would give more, it samples alone. A
    draft that is there all the same is compared with what the target sampled, so acceptance is
    known without a verification. While costs are not known, twice as many are drafted where all
    were accepted, else one more than were. After MISSES drafts of which nothing was right, or
    without a draft, the target samples more and more tokens before one is asked for again.
    """

    def __init__(self, most: int, costs: RoundCosts, *, computes_prompt: bool = False):
        self._most = most
        self._costs = costs
        self._computes_prompt = computes_prompt
        self._accepted, self._rejected = ASSUMED
        self._num_misses = 0
        self._untimed = min(most, FIRST_DRAFTED)
        self.plain = FIRST_PLAIN

    @property
    def is_plain(self) -> bool:
        return self._num_misses >= MISSES

    def rows(self, num_prompt: int, num_drafted: int) -> int:
        """Tokens that a verification computes."""
        return num_drafted + 1 + (num_prompt if self._computes_prompt else 0)

    def drafted(self, num_prompt: int) -> int:
        """For the next round."""
        lengths = [1 << power for power in range(self._most.bit_length())]
        speeds = {num: self._speed(num_prompt, num) for num in {*lengths, self._most}}
        if any(map(math.isnan, speeds.values())):
            return self._untimed
        return max(speeds, key=speeds.__getitem__)

    def pays(self, num_prompt: int, num_drafted: int) -> bool:
        """Whether this draft is to be verified."""
        alone = MOST_PLAIN / (self._costs.plain.at(MOST_PLAIN) or math.nan)
        speed = self._speed(num_prompt, num_drafted, is_there=True)
        return math.isnan(alone) or math.isnan(speed) or speed > alone

    def was_plain(self, num_drafted: int = 0, num_right: int = 0) -> None:
        """num_drafted: of a draft that was there, those that can be compared with the sample."""
        self.plain = min(2 * self.plain, self._most_plain())
        if num_drafted:
            self._learn(num_drafted, num_right)
        else:  # a single miss is enough to go on so
            self._num_misses = min(self._num_misses, MISSES - 1)

    def was_verified(self, num_drafted: int, num_accepted: int) -> None:
        if num_accepted:
            self.plain = FIRST_PLAIN
        self._learn(num_drafted, num_accepted)

    def _learn(self, num_drafted: int, num_accepted: int) -> None:
        is_whole = num_accepted == num_drafted
        self._accepted = MEMORY * self._accepted + num_accepted
        self._rejected = MEMORY * self._rejected + (not is_whole)
        self._untimed = min(self._most, 2 * num_drafted if is_whole else num_accepted + 1)
        self._num_misses = 0 if num_accepted else self._num_misses + 1

    def _speed(self, num_prompt: int, num: int, *, is_there: bool = False) -> float:
        """Tokens a second, the target's own among them; NaN where costs are not known."""
        rate = self._accepted / (self._accepted + self._rejected + 1e-3)
        tokens = (1 - rate ** (num + 1)) / (1 - rate)
        seconds = self._costs.verified.at(self.rows(num_prompt, num))
        if not is_there:
            seconds += self._costs.drafted.at(num)
        return tokens / (seconds or math.nan)

    def _most_plain(self) -> int:
        """So many that a request's own cost is SMALL, and a quarter of MOST_PLAIN at least."""
        fit = self._costs.plain
        intercept, slope = fit.line if fit.weight else (0.0, None)
        enough = (1 - SMALL) / SMALL * intercept / slope if slope else 0.0
        return int(min(MOST_PLAIN, max(MOST_PLAIN // 4, enough)))
