"""Talk over several turns: a story, an order, a booking, a repair, a journey."""

import random

from scripts.tasks import lexicon, passages, questions


def story(rng: random.Random, hero: str, thing: str, place: str) -> str:
    """Eight sentences: a hero, a loss, a helper, a find."""
    animals = [a for a in lexicon.ANIMALS if a != hero and not lexicon.is_held_out(a)]
    helper, name = rng.choice(animals), rng.choice(lexicon.NAMES)
    adjective, weather = rng.choice(lexicon.ADJECTIVES), rng.choice(lexicon.WEATHER)
    feeling, food = rng.choice(lexicon.FEELINGS), rng.choice(lexicon.FOOD)
    begin = beginning(rng, hero, name, place)
    wish = f"{lexicon.with_article(adjective)} {thing}"
    middle = [
        [
            f"Every day {name} carried {wish} and looked for {food}.",
            f"{name} loved {wish} more than anything else.",
            f"{name} wanted {wish} for a long time.",
        ],
        [
            f"One {weather} morning the {thing} was gone.",
            f"One {weather} day {name} lost the {thing} near the old tree.",
            f"One {weather} evening the {thing} fell into the water.",
        ],
        [
            f"{name} felt {feeling} and asked {lexicon.with_article(helper)} for help.",
            f'"Have you seen my {thing}?" asked {name}.',
            f"{name} was {feeling} and did not know what to do.",
        ],
    ]
    sentences = [begin, *(rng.choice(choices) for choices in middle)]
    sentences += ending(rng, name, helper, thing, food)
    return " ".join(sentences)


def beginning(rng: random.Random, hero: str, name: str, place: str) -> str:
    adjective = lexicon.with_article(rng.choice(lexicon.ADJECTIVES))
    kind = rng.choice(["quiet", "little", "far"])
    a_hero = lexicon.with_article(hero)
    return rng.choice(
        [
            f"Once upon a time there was {a_hero} named {name} "
            f"who lived near the {place}.",
            f"{name} was {adjective} {hero} who lived by the {place}.",
            f"Long ago, in a {kind} {place}, lived {a_hero} named {name}.",
        ]
    )


def ending(rng: random.Random, name: str, helper: str, thing: str, food: str):
    """Draws the last four sentences."""
    near, far = rng.choice(lexicon.PLACES), rng.choice(lexicon.PLACES)
    choices = [
        [
            f'"I saw it on the path to the {near}," said the {helper}.',
            f'"Do not worry," said the {helper}. "We will find it together."',
            f"The {helper} thought for a while and pointed to the {far}.",
        ],
        [
            f"They walked all day and shared some {food}.",
            "Together they looked under every stone and behind every tree.",
            "They crossed the bridge and climbed the hill.",
        ],
        [
            f"At last they found the {thing} under a pile of leaves.",
            f"In the end the {thing} was hanging on a branch.",
            f"Then the {helper} saw something shine, and it was the {thing}.",
        ],
        [
            f"{name} thanked the {helper}, and from that day they were friends.",
            f"{name} was happy again and never forgot the help of the {helper}.",
            f"They went home together, and {name} learned that good friends are worth "
            f"more than any {thing}.",
        ],
    ]
    return [rng.choice(sentences) for sentences in choices]


def tell_story(rng: random.Random, held_out: bool) -> questions.Turns:
    hero = lexicon.pick(rng, lexicon.ANIMALS, held_out)
    thing, place = rng.choice(lexicon.OBJECTS), rng.choice(lexicon.PLACES)
    text = story(rng, hero, thing, place)
    a_hero, a_thing = lexicon.with_article(hero), lexicon.with_article(thing)
    wishes = [
        f"Write a short story about {a_hero}, {a_thing} and "
        f"{lexicon.with_article(place)}.",
        f"Tell me a story about {a_hero} who has {a_thing} and lives near the {place}.",
    ]
    turns = [(rng.choice(wishes), text)]
    if rng.random() < 0.6:
        last = text.split(". ")[-1]
        if last.startswith("They "):
            last = "t" + last[1:]
        asked = ["What is the moral of the story?", "What can we learn from it?"]
        moral = f"The story shows that it is good to ask for help. In the end, {last}"
        turns.append((rng.choice(asked), moral))
    return turns


def order(rng: random.Random, held_out: bool) -> questions.Turns:
    food, count = rng.choice(lexicon.FOOD), rng.randint(2, 9)
    day = rng.choice(["Monday", "Tuesday", "Friday", "Saturday"])
    goods = f"{count} boxes of {food}"
    return [
        (
            f"Hello, I would like to order {goods}.",
            f"Of course. {goods}. When should we deliver them?",
        ),
        (
            f"On {day}, please.",
            f"Thank you. We will deliver {goods} on {day}. "
            "Would you like anything else?",
        ),
        (
            "No, that is all.",
            f"Great. Your order of {goods} is complete. Have a nice day!",
        ),
    ]


def booking(rng: random.Random, held_out: bool) -> questions.Turns:
    place, hour = rng.choice(lexicon.PLACES), rng.randint(1, 12)
    count, name = rng.randint(2, 8), rng.choice(lexicon.NAMES)
    return [
        (
            f"Can you book a table for {count} people near the {place}?",
            f"Yes. At what time should I book the table for {count} people?",
        ),
        (
            f"At {hour} o'clock, under the name {name}.",
            f"I booked a table for {count} people near the {place} at {hour} o'clock "
            f"under the name {name}.",
        ),
        (
            "Can you change it to one hour later?",
            f"Sure. The table for {count} people is now booked at {hour % 12 + 1} "
            f"o'clock under the name {name}.",
        ),
    ]


def repair(rng: random.Random, held_out: bool) -> questions.Turns:
    thing, adjective = rng.choice(lexicon.OBJECTS), rng.choice(lexicon.ADJECTIVES)
    surface = rng.choice(["clean", "dry", "flat"])
    steps = [
        f"Find a {surface} place to work.",
        f"Take the {thing} apart and look at every piece.",
        "Clean each piece with a soft cloth.",
        "Replace the parts that are broken.",
        f"Put the {thing} together again and test it.",
    ]
    what = f"{lexicon.with_article(adjective)} {thing}"
    numbered = "\n".join(f"{i}. {step}" for i, step in enumerate(steps, 1))
    last = steps[-1][0].lower() + steps[-1][1:]
    return [
        (
            f"How can I repair {what}?",
            f"Here is how you can repair {what}:\n{numbered}",
        ),
        (
            "Which step is the most important?",
            f"The most important step is the last one: {last}",
        ),
    ]


def journey(rng: random.Random, held_out: bool) -> questions.Turns:
    c = lexicon.pick(rng, lexicon.COUNTRIES, held_out)
    return [
        (
            f"I want to travel to {c.name}. What should I know?",
            f"{passages.country(c)} I would start in {c.capital} and learn a few words "
            f"of {c.language}.",
        ),
        (
            "How should I pay there?",
            f"In {c.name} people pay with the {c.currency}, so bring some with you.",
        ),
        (
            "Please write it in one sentence.",
            f"Start in {c.capital}, learn some {c.language}, "
            f"and pay with the {c.currency}.",
        ),
    ]


KINDS = [tell_story, order, booking, repair, journey]


def conversation(rng: random.Random, held_out: bool) -> questions.Turns:
    return KINDS[rng.randrange(len(KINDS))](rng, held_out)
