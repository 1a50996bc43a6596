"""Short passages that the tasks ask about: countries, elements, village news."""

import random

from scripts.tasks import lexicon

# (article, its summary)
NEWS = [
    (
        "The council approved a new plan for the old {place} on {day}. The plan will "
        "cost {n} thousand dollars and will take {m} months. {a}, who leads the "
        "council, said that the {place} had been closed for too long. Some neighbors "
        "were worried about noise from the work. {b}, who owns a shop next to the "
        "{place2}, said that more visitors would help everyone. Work will begin after "
        "the winter holidays.",
        "The council approved a {n} thousand dollar plan for the old {place}. The work "
        "will take {m} months and begin after the winter holidays.",
    ),
    (
        "A {weather} night closed the road near the {place} on {day}. About {n} "
        "families had to leave their homes and sleep in the school. {a} from the fire "
        "service said that nobody was hurt. Volunteers brought {food} and blankets to "
        "the families. {b} opened the {place2} so that people could dry their clothes. "
        "The road should be open again in {m} days.",
        "A {weather} night closed the road near the {place} and {n} families had to "
        "leave their homes. Nobody was hurt, and the road should be open again in {m} "
        "days.",
    ),
    (
        "{a} won the yearly boat race at the {place} on {day}. There were {n} boats on "
        "the water, more than ever before. The race was close until the last turn, "
        "when {b} hit a rock and lost speed. {a} has trained for {m} years and said "
        "that the {weather} weather was the hardest part. The winner received "
        "{an_object} made of silver. Next year the race will move to the {place2}.",
        "{a} won the yearly boat race at the {place} against {n} boats. {b} lost speed "
        "after hitting a rock, and next year the race will move to the {place2}.",
    ),
    (
        "Workers found {an_adjective} {object} under the floor of the {place} on "
        "{day}. Experts believe that it is about {n}0 years old. {a}, who studies old "
        "things, said that such finds are very rare. The {object} was wrapped in cloth "
        "and was almost undamaged. {b} will show it in the museum near the {place2} "
        "for {m} weeks. Entry will be free for children.",
        "Workers found {an_object} that is about {n}0 years old under the floor of the "
        "{place}. It will be shown in the museum near the {place2} for {m} weeks.",
    ),
    (
        "A bakery that sells {food} opened next to the {place} on {day}. {a} and {b} "
        "saved money for {m} years to open the shop. On the first day more than {n} "
        "customers came, and everything was sold before noon. The bakery uses flour "
        "from the mill near the {place2}. {a} said that the long hours are hard but "
        "worth it. They hope to hire two more people in spring.",
        "{a} and {b} opened a bakery that sells {food} next to the {place}. More than "
        "{n} customers came on the first day, and they hope to hire two more people in "
        "spring.",
    ),
    (
        "The train between the {place} and the {place2} will not run on {day}. "
        "Engineers must repair {n} meters of track after the {weather} weather. Buses "
        "will replace the train and leave every {m} minutes. {a}, who takes the train "
        "every day, said that the buses are slow. {b} from the railway asked travelers "
        "to be patient. Tickets for the train can be used on the bus.",
        "The train between the {place} and the {place2} will not run on {day} because "
        "{n} meters of track must be repaired. Buses will leave every {m} minutes and "
        "train tickets can be used.",
    ),
    (
        "A school class counted birds near the {place} for {m} days. The {n} children "
        "wrote down every bird that they saw. {a}, their teacher, said that they "
        "learned to be patient and quiet. The most common bird was the crow, and the "
        "rarest was the owl. {b} made a map of all the nests between the {place} and "
        "the {place2}. The class will repeat the count next year.",
        "A class of {n} children counted birds near the {place} for {m} days. The crow "
        "was the most common bird and the owl was the rarest, and the count will be "
        "repeated next year.",
    ),
]
WITH_ADJECTIVE = 3  # the one article that draws an adjective as well


def news(rng: random.Random) -> tuple[str, str]:
    """Returns an article of the village and its summary."""
    words = dict(zip("ab", rng.sample(lexicon.NAMES, 2), strict=True))
    words["place"], words["place2"] = rng.sample(lexicon.PLACES, 2)
    words["n"], words["day"] = rng.randint(2, 90), rng.choice(lexicon.WEEKDAYS)
    words["object"], words["food"] = (
        rng.choice(lexicon.OBJECTS),
        rng.choice(lexicon.FOOD),
    )
    words["weather"], words["m"] = rng.choice(lexicon.WEATHER), rng.randint(2, 30)
    words["an_object"] = lexicon.with_article(words["object"])
    kind = rng.randrange(len(NEWS))
    if kind == WITH_ADJECTIVE:
        words["an_adjective"] = lexicon.with_article(rng.choice(lexicon.ADJECTIVES))
    article, summary = NEWS[kind]
    return article.format(**words), summary.format(**words)


def country(c: lexicon.Country) -> str:
    return (
        f"{c.name} is a country in {c.continent}. Its capital is {c.capital}. "
        f"The main language spoken in {c.name} is {c.language}, "
        f"and people pay with the {c.currency}."
    )


def element(e: lexicon.Element) -> str:
    what = "a liquid metal" if e.name == "mercury" else f"a {e.kind}"
    return (
        f"The chemical element {e.name} has the symbol {e.symbol} and the atomic "
        f"number {e.number}. At room temperature it is {what}."
    )
