"""Word problems in one or two steps; the answer stands after `####`."""

import random
from typing import NamedTuple

from scripts.tasks import lexicon, questions


class Words(NamedTuple):
    """What every problem may use: two people, a food and three numbers."""

    a: str
    b: str
    food: str
    x: int
    y: int
    z: int


def draw_words(rng: random.Random) -> Words:
    a, b = rng.sample(lexicon.NAMES, 2)
    food = rng.choice(lexicon.FOOD)
    return Words(a, b, food, rng.randint(2, 20), rng.randint(2, 12), rng.randint(1, 9))


def eaten(rng: random.Random, w: Words) -> tuple[str, list[str], int]:
    total, eaten = w.x + w.y, min(w.z, w.x)
    asked = (
        f"{w.a} has {w.x} {w.food}. {w.b} gives {w.a} {w.y} more {w.food}. "
        f"Then {w.a} eats {eaten} of them. How many {w.food} does {w.a} have left?"
    )
    steps = [
        f"{w.a} starts with {w.x} {w.food}.",
        f"After {w.b} gives {w.y} more, {w.a} has {w.x} + {w.y} = {total} {w.food}.",
        f"{w.a} eats {eaten}, so {total} - {eaten} = {total - eaten} {w.food} "
        "are left.",
    ]
    return asked, steps, total - eaten


def boxes(rng: random.Random, w: Words) -> tuple[str, list[str], int]:
    total = w.x * w.y
    asked = (
        f"A box holds {w.y} {w.food}. {w.a} buys {w.x} boxes and gives {w.z} {w.food} "
        f"to {w.b}. How many {w.food} does {w.a} keep?"
    )
    steps = [
        f"{w.x} boxes with {w.y} {w.food} each make {w.x} * {w.y} = {total} {w.food}.",
        f"{w.a} gives away {w.z}, so {total} - {w.z} = {total - w.z} {w.food} remain.",
    ]
    return asked, steps, total - w.z


def pages(rng: random.Random, w: Words) -> tuple[str, list[str], int]:
    days = rng.randint(2, 6)
    read, rest = w.x * w.y, days * w.z
    asked = (
        f"{w.a} reads {w.x} pages every day for {w.y} days. The book has {read + rest} "
        f"pages. {w.a} wants to finish the rest in {days} days. How many pages per day "
        f"must {w.a} read?"
    )
    steps = [
        f"In {w.y} days {w.a} reads {w.x} * {w.y} = {read} pages.",
        f"{read + rest} - {read} = {rest} pages are left.",
        f"{rest} / {days} = {w.z} pages per day.",
    ]
    return asked, steps, w.z


def tickets(rng: random.Random, w: Words) -> tuple[str, list[str], int]:
    child = rng.randint(2, 9)
    children, adults = w.z * child, w.y * child * 2
    asked = (
        f"A ticket costs {child} dollars for a child and {child * 2} dollars for an "
        f"adult. {w.a} goes with {w.z} children and {w.y} adults. How much do the "
        "tickets cost in total?"
    )
    steps = [
        f"The children cost {w.z} * {child} = {children} dollars.",
        f"The adults cost {w.y} * {child * 2} = {adults} dollars.",
        f"Together that is {children} + {adults} = {children + adults} dollars.",
    ]
    return asked, steps, children + adults


def units(rng: random.Random, w: Words) -> tuple[str, list[str], int]:
    unit = rng.choice(lexicon.UNITS)
    if unit.whole in ("hour", "minute", "day", "week", "year"):
        amount = f"{w.a} needs {w.x} {unit.whole}s of work."
    else:
        goods = "rope" if "meter" in unit.whole or "kilo" in unit.whole else "eggs"
        amount = f"{w.a} has {w.x} {unit.whole}s of {goods}."
    total = w.x * unit.count
    steps = [
        f"One {unit.whole} is {unit.count} {unit.parts}.",
        f"{w.x} * {unit.count} = {total} {unit.parts}.",
    ]
    return f"{amount} How many {unit.parts} is that?", steps, total


def train(rng: random.Random, w: Words) -> tuple[str, list[str], int]:
    speed, hours = rng.randint(10, 90), rng.randint(2, 8)
    first = speed * hours
    asked = (
        f"A train travels {speed} kilometers every hour. After {hours} hours it stops "
        f"for a break and then travels {w.y} more kilometers. How far does it travel "
        "in total?"
    )
    steps = [
        f"In {hours} hours the train travels {speed} * {hours} = {first} kilometers.",
        f"After the break it travels {w.y} more, "
        f"so {first} + {w.y} = {first + w.y} kilometers.",
    ]
    return asked, steps, first + w.y


PROBLEMS = [eaten, boxes, pages, tickets, units, train]


def math_reasoning(rng: random.Random, held_out: bool) -> questions.Turns:
    words = draw_words(rng)
    asked, steps, result = PROBLEMS[rng.randrange(len(PROBLEMS))](rng, words)
    return [(asked, "\n".join([*steps, f"#### {result}"]))]
