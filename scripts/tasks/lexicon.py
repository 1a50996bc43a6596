"""The word lists and plain facts of the generated tasks."""

import random
from typing import NamedTuple


class Country(NamedTuple):
    name: str
    capital: str
    continent: str
    language: str
    currency: str


class Element(NamedTuple):
    name: str
    symbol: str
    number: str
    kind: str


class Unit(NamedTuple):
    parts: str
    whole: str
    count: int


class Noun(NamedTuple):
    """A German noun with its gender (m, f, n) and its English word."""

    german: str
    gender: str
    english: str


def rows(text: str) -> list[list[str]]:
    """Splits a table of entries `a|b|c;` over several lines."""
    entries = text.replace("\n", ";").split(";")
    return [entry.strip().split("|") for entry in entries if entry.strip()]


NAMES = """Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Maya Noah Olga
Paul Rosa Sam Tara Victor Wendy Yusuf Zoe Oscar Nina Milo""".split()
ANIMALS = """fox bear rabbit owl hedgehog mouse squirrel duck goose frog badger deer
wolf cat dog pony turtle crow otter lamb""".split()
OBJECTS = """lantern key basket drum kite map boat blanket whistle bell hat ladder
ribbon lamp shovel rope mirror wagon bucket book""".split()
PLACES = """forest village meadow river harbor hill market garden lake mill valley
orchard castle bridge barn island library farm tower beach""".split()
FEELINGS = "happy sad brave tired curious proud worried calm lonely cheerful".split()
ADJECTIVES = """small old red quiet green bright heavy broken golden dusty round warm
cold tall blue shiny""".split()
FOOD = "apples bread cheese honey soup berries nuts cake pears carrots".split()
WEATHER = "rainy windy sunny foggy snowy stormy".split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

COUNTRIES = [
    Country(*row)
    for row in rows("""
France|Paris|Europe|French|euro;Germany|Berlin|Europe|German|euro
Italy|Rome|Europe|Italian|euro;Spain|Madrid|Europe|Spanish|euro
Portugal|Lisbon|Europe|Portuguese|euro;Austria|Vienna|Europe|German|euro
Poland|Warsaw|Europe|Polish|zloty;Greece|Athens|Europe|Greek|euro
Norway|Oslo|Europe|Norwegian|krone;Sweden|Stockholm|Europe|Swedish|krona
Finland|Helsinki|Europe|Finnish|euro;Denmark|Copenhagen|Europe|Danish|krone
Ireland|Dublin|Europe|English|euro;Hungary|Budapest|Europe|Hungarian|forint
Romania|Bucharest|Europe|Romanian|leu;Bulgaria|Sofia|Europe|Bulgarian|lev
Egypt|Cairo|Africa|Arabic|pound;Kenya|Nairobi|Africa|Swahili|shilling
Ghana|Accra|Africa|English|cedi;Morocco|Rabat|Africa|Arabic|dirham
Nigeria|Abuja|Africa|English|naira;Ethiopia|Addis Ababa|Africa|Amharic|birr
Senegal|Dakar|Africa|French|franc;Tunisia|Tunis|Africa|Arabic|dinar
Japan|Tokyo|Asia|Japanese|yen;China|Beijing|Asia|Chinese|yuan
India|New Delhi|Asia|Hindi|rupee;Thailand|Bangkok|Asia|Thai|baht
Vietnam|Hanoi|Asia|Vietnamese|dong;Nepal|Kathmandu|Asia|Nepali|rupee
Turkey|Ankara|Asia|Turkish|lira;Indonesia|Jakarta|Asia|Indonesian|rupiah
Mongolia|Ulaanbaatar|Asia|Mongolian|tugrik;Jordan|Amman|Asia|Arabic|dinar
Canada|Ottawa|North America|English|dollar
Mexico|Mexico City|North America|Spanish|peso
Cuba|Havana|North America|Spanish|peso
Panama|Panama City|North America|Spanish|balboa
Jamaica|Kingston|North America|English|dollar
Brazil|Brasilia|South America|Portuguese|real
Argentina|Buenos Aires|South America|Spanish|peso
Chile|Santiago|South America|Spanish|peso
Peru|Lima|South America|Spanish|sol
Uruguay|Montevideo|South America|Spanish|peso
Ecuador|Quito|South America|Spanish|dollar
Australia|Canberra|Oceania|English|dollar
New Zealand|Wellington|Oceania|English|dollar
Fiji|Suva|Oceania|English|dollar
""")
]
ELEMENTS = [
    Element(*row)
    for row in rows("""
hydrogen|H|1|gas;helium|He|2|gas;lithium|Li|3|metal;carbon|C|6|solid
nitrogen|N|7|gas;oxygen|O|8|gas;neon|Ne|10|gas;sodium|Na|11|metal
magnesium|Mg|12|metal;aluminium|Al|13|metal;silicon|Si|14|solid;sulfur|S|16|solid
chlorine|Cl|17|gas;argon|Ar|18|gas;potassium|K|19|metal;calcium|Ca|20|metal
iron|Fe|26|metal;nickel|Ni|28|metal;copper|Cu|29|metal;zinc|Zn|30|metal
silver|Ag|47|metal;tin|Sn|50|metal;iodine|I|53|solid;gold|Au|79|metal
mercury|Hg|80|metal;lead|Pb|82|metal
""")
]
UNITS = [
    Unit("minutes", "hour", 60),
    Unit("seconds", "minute", 60),
    Unit("hours", "day", 24),
    Unit("days", "week", 7),
    Unit("months", "year", 12),
    Unit("centimeters", "meter", 100),
    Unit("grams", "kilogram", 1000),
    Unit("meters", "kilometer", 1000),
    Unit("eggs", "dozen", 12),
]

GERMAN_BEINGS = [
    Noun(*row)
    for row in rows("""
Hund|m|dog;Katze|f|cat;Vogel|m|bird;Pferd|n|horse;Kind|n|child;Mann|m|man
Frau|f|woman;Lehrer|m|teacher;Arzt|m|doctor;Freund|m|friend
""")
]
GERMAN_THINGS = [
    Noun(*row)
    for row in rows("""
Buch|n|book;Brief|m|letter;Apfel|m|apple;Brot|n|bread;Ball|m|ball;Stuhl|m|chair
Tisch|m|table;Lampe|f|lamp;Uhr|f|clock;Tasche|f|bag;Schule|f|school
Garten|m|garden;Stadt|f|city;Haus|n|house;Fenster|n|window;Auto|n|car;Zug|m|train
Fahrrad|n|bicycle;Blume|f|flower;Baum|m|tree
""")
]
GERMAN_ADJECTIVES = rows(
    "klein|small;alt|old;neu|new;rot|red;schön|beautiful;jung|young;ruhig|quiet;groß|big"
)
GERMAN_TRANSITIVE = rows("""sieht|sees;findet|finds;kauft|buys;sucht|looks for
zeichnet|draws;bringt|brings;braucht|needs""")
GERMAN_INTRANSITIVE = rows("""schläft|sleeps;wartet|waits;spielt|plays;arbeitet|works
singt|sings;lacht|laughs""")
GERMAN_TIMES = rows("""heute|today;morgen|tomorrow;am Abend|in the evening
am Montag|on Monday;jeden Tag|every day;im Sommer|in summer""")
GERMAN_PLACES = rows("""im Garten|in the garden;in der Stadt|in the city
am See|by the lake;in der Schule|at school;vor dem Haus|in front of the house
im Park|in the park""")
NOMINATIVE = {"m": "Der", "f": "Die", "n": "Das"}
ACCUSATIVE = {"m": "den", "f": "die", "n": "das"}

# Never the subject of a training sample; the prompts are about these where they can be.
HELD_OUT = {"Hungary", "Kenya", "Nepal", "Peru", "zinc", "neon", "otter"}


def is_held_out(item) -> bool:
    return (item if isinstance(item, str) else item[0]) in HELD_OUT


def pick(rng: random.Random, items: list, held_out: bool):
    """Draws a held-out item, or one that is not; any item where none fits."""
    return rng.choice([i for i in items if is_held_out(i) == held_out] or items)


def with_article(word: str) -> str:
    """Puts "a" or "an" before an English word."""
    return ("an " if word[0] in "aeiou" else "a ") + word
