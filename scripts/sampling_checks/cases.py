"""Which rules, drafters and settings are checked."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from scripts.sampling_checks import drafts, toys, twins
from treewy_jax import accept as accept_lib
from treewy_jax import sampling as sampling_lib

Sampling = sampling_lib.Sampling
SETTINGS = {
    "T 0.5": Sampling(0.5),
    "T 1": Sampling(1.0),
    "T 1.5": Sampling(1.5),
    "top-k": Sampling(1.5, top_k=3),
    "top-p, min-p": Sampling(1.5, top_p=0.8, min_p=0.1),
    "penalties": Sampling(0.5, repetition_penalty=1.7, presence_penalty=0.8),
    "all": Sampling(1.0, 6, 0.9, 0.05, repetition_penalty=1.3, presence_penalty=0.5),
    "T 0": Sampling(),
    "T 0, penalties": Sampling(repetition_penalty=1.7, presence_penalty=0.8),
}
# Drafters of less common shapes, and `match` where it does not look at the draws.
FEW = ("T 0.5", "T 1.5", "all", "T 0")
# How far from the target the draft is: see toys.tables.
FAR = {"near": -2.5, "unlike": 0.0, "adversarial": 4.0}
TABLES = {name: toys.tables(far=far) for name, far in FAR.items()}
TWIN_SETTINGS = {twins.AT_ZERO: "top-k", twins.NOT_NORMALISED: "T 1"}


class Case(NamedTuple):
    """A row of the table.

    Attributes:
        rule: the name of a rule of acceptance.
        drafter: a name in drafts.NAMES.
        sampled: its drafts are drawn, else they are the best.
        draft: a name in FAR.
        setting: a name in SETTINGS.
        fault: of a twin, which has to fail.
    """

    rule: str
    drafter: str
    sampled: bool
    draft: str
    setting: str
    fault: str | None = None

    @property
    def sampling(self) -> Sampling:
        return SETTINGS[self.setting]

    @property
    def accept(self) -> accept_lib.Rule:
        """The rule itself, or its twin."""
        if self.fault is None:
            return accept_lib.RULES[self.rule]
        return twins.TWINS[self.rule, self.fault]

    @property
    def program(self) -> "Case":
        """Cases that agree in this run one compiled program."""
        return self._replace(draft="")


def choose(
    rules: Sequence[str],
    names: Sequence[str],
    settings: Sequence[str],
    kinds: Sequence[str],
) -> list[Case]:
    """Return the cases of these rules, drafters, settings and drafts, twins last."""
    found = []
    for rule, name in itertools.product(rules, names):
        for sampled, setting in _fitting(rule, name):
            if setting not in settings:
                continue
            own = kinds[:1] if name in drafts.FROM_TEXT else kinds
            found += [Case(rule, name, sampled, kind, setting) for kind in own]
    return found + [case for case in _twins() if case.rule in rules]


def _fitting(rule: str, name: str) -> Iterator[tuple[bool, str]]:
    """Yield whether drafts are drawn, and the settings, that go with a rule."""
    wanted = accept_lib.RULES[rule]
    if wanted.chains_only and name != "1,1,1":
        return
    for sampled, setting in itertools.product((False, True), SETTINGS):
        if SETTINGS[setting].greedy != wanted.greedy_only:
            continue
        if sampled and name not in drafts.DRAWN or wanted.needs_draft and not sampled:
            continue
        common = name in ("1,1,1", "2,2,1", "3,3") and (
            wanted.needs_draft or not sampled
        )
        if common or setting in FEW:
            yield sampled, setting


def _twins() -> Iterator[Case]:
    for rule, fault in twins.TWINS:
        name = "1,1,1" if rule == "block" else "3,3"
        yield Case(rule, name, True, "adversarial", TWIN_SETTINGS[fault], fault)
