"""Translation, summarization, plain questions, and questions about passages."""

import random

from scripts.tasks import lexicon, passages

Turns = list[tuple[str, str]]


def german_sentence(rng: random.Random) -> tuple[str, str]:
    """Returns a German sentence and its translation."""
    being = rng.choice(lexicon.GERMAN_BEINGS)
    adjective, english_adjective = rng.choice(lexicon.GERMAN_ADJECTIVES)
    subject = f"{lexicon.NOMINATIVE[being.gender]} {adjective}e {being.german}"
    english_subject = f"The {english_adjective} {being.english}"
    if rng.random() < 0.5:
        verb, english_verb = rng.choice(lexicon.GERMAN_INTRANSITIVE)
        time, english_time = rng.choice(lexicon.GERMAN_TIMES)
        place, english_place = rng.choice(lexicon.GERMAN_PLACES)
        return (
            f"{subject} {verb} {time} {place}.",
            f"{english_subject} {english_verb} {english_place} {english_time}.",
        )
    verb, english_verb = rng.choice(lexicon.GERMAN_TRANSITIVE)
    thing = rng.choice(lexicon.GERMAN_THINGS)
    adjective, english_adjective = rng.choice(lexicon.GERMAN_ADJECTIVES)
    time, english_time = rng.choice(lexicon.GERMAN_TIMES)
    ending = "en" if thing.gender == "m" else "e"
    german_object = (
        f"{lexicon.ACCUSATIVE[thing.gender]} {adjective}{ending} {thing.german}"
    )
    english_object = f"the {english_adjective} {thing.english}"
    return (
        f"{subject} {verb} {time} {german_object}.",
        f"{english_subject} {english_verb} {english_object} {english_time}.",
    )


def translation(rng: random.Random, held_out: bool) -> Turns:
    count = rng.choice([1, 1, 2, 2, 3, 4])
    german, english = zip(*(german_sentence(rng) for _ in range(count)), strict=True)
    return [("Translate German to English: " + " ".join(german), " ".join(english))]


def summarization(rng: random.Random, held_out: bool) -> Turns:
    count = 2 if rng.random() < 0.3 else 1
    articles, summaries = zip(*(passages.news(rng) for _ in range(count)), strict=True)
    return [("Summarize: " + "\n\n".join(articles), " ".join(summaries))]


def country_question(rng: random.Random, held_out: bool, kind: int):
    c = lexicon.pick(rng, lexicon.COUNTRIES, held_out)
    questions, answer = [
        (
            [
                f"What is the capital of {c.name}?",
                f"Which city is the capital of {c.name}?",
                f"Name the capital city of {c.name}.",
            ],
            f"The capital of {c.name} is {c.capital}.",
        ),
        (
            [f"On which continent is {c.name}?", f"Where is {c.name}?"],
            f"{c.name} is in {c.continent}.",
        ),
        (
            [
                f"Which language do people speak in {c.name}?",
                f"What is the main language of {c.name}?",
            ],
            f"The main language of {c.name} is {c.language}.",
        ),
    ][kind]
    return rng.choice(questions), answer


def element_question(rng: random.Random, held_out: bool, by_symbol: bool):
    e = lexicon.pick(rng, lexicon.ELEMENTS, held_out)
    if not by_symbol:
        answer = f"The atomic number of {e.name} is {e.number}."
        return f"What is the atomic number of {e.name}?", answer
    questions = [
        f"What is the symbol of {e.name}?",
        f"Which symbol does the element {e.name} have?",
    ]
    return rng.choice(questions), f"The symbol of {e.name} is {e.symbol}."


def unit_question(rng: random.Random):
    unit = rng.choice(lexicon.UNITS)
    whole = ("an " if unit.whole == "hour" else "a ") + unit.whole
    return (
        f"How many {unit.parts} are in {whole}?",
        f"There are {unit.count} {unit.parts} in {whole}.",
    )


def question(rng: random.Random, held_out: bool) -> tuple[str, str]:
    kind = rng.randrange(6)
    if kind < 3:
        return country_question(rng, held_out, kind)
    if kind < 5:
        return element_question(rng, held_out, by_symbol=kind == 3)
    return unit_question(rng)


def qa(rng: random.Random, held_out: bool) -> Turns:
    return [question(rng, held_out) for _ in range(rng.choice([1, 1, 1, 2, 3]))]


def catalogue(rng: random.Random) -> tuple[str, str, str]:
    """An invented museum entry: its answer can come from the passage only."""
    thing, place = rng.choice(lexicon.OBJECTS), rng.choice(lexicon.PLACES)
    number, year = rng.randint(3, 99), rng.randint(1700, 1990)
    room = number % 12 + 1
    return (
        f"Catalogue entry {number}: {lexicon.with_article(thing)} from the {place}. "
        f"It was made in {year} and given to the museum by "
        f"{rng.choice(lexicon.NAMES)}. It is kept in room {room}.",
        f"When was the {thing} in catalogue entry {number} made, "
        "and in which room is it kept?",
        f"The {thing} in catalogue entry {number} was made in {year} "
        f"and is kept in room {room}.",
    )


def passage_question(rng: random.Random, c: lexicon.Country, e: lexicon.Element):
    """Returns the passage that holds the answer, the question, the answer."""
    kind = rng.randrange(4)
    if kind == 3:
        return catalogue(rng)
    return [
        (
            passages.country(c),
            f"What is the capital of {c.name} and which language is spoken there?",
            f"The capital of {c.name} is {c.capital}, "
            f"and the main language spoken there is {c.language}.",
        ),
        (
            passages.country(c),
            f"Which currency do people in {c.name} use?",
            f"According to the passages, people in {c.name} pay with the {c.currency}.",
        ),
        (
            passages.element(e),
            f"What are the symbol and the atomic number of {e.name}?",
            f"The element {e.name} has the symbol {e.symbol} "
            f"and the atomic number {e.number}.",
        ),
    ][kind]


def others(items: list, item) -> list:
    """The items that may stand beside `item` as distractors."""
    return [i for i in items if not lexicon.is_held_out(i) and i != item]


def rag(rng: random.Random, held_out: bool) -> Turns:
    c = lexicon.pick(rng, lexicon.COUNTRIES, held_out)
    e = lexicon.pick(rng, lexicon.ELEMENTS, held_out)
    article, _ = passages.news(rng)
    other_countries = others(lexicon.COUNTRIES, c)
    texts = [
        passages.country(other)
        for other in rng.sample(other_countries, rng.randint(1, 3))
    ]
    texts.append(passages.element(rng.choice(others(lexicon.ELEMENTS, e))))
    texts.append(article)
    passage, asked, answer = passage_question(rng, c, e)
    texts.append(passage)
    rng.shuffle(texts)
    return [("\n\n".join(texts) + "\n\nQuestion: " + asked, answer)]
