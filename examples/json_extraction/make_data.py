"""Sentences about one person, and the person's name and age: train.jsonl and held_out.jsonl.

    python examples/json_extraction/make_data.py OUT_DIR [--seed 0]

No name and no sentence frame of the held-out rows occurs in training, so what is measured there is whether the
model reads, not what it remembers. Most sentences also hold another number, another name or both. All ages are
from 18 to 89, and the other number of a sentence is never the age.
"""

import argparse
import json
import random
from pathlib import Path

TRAIN_ROWS, HELD_OUT_ROWS = 1024, 256

INSTRUCTION = 'Extract the name and age from this sentence as a JSON object with the keys "name" and "age".'


def words(text: str) -> list[str]:
    return text.split()


TRAIN_NAMES = words(
    "Alice Amir Anna Ben Bruno Carla Carlos Chen Clara Daniel Diego Elena Emma Erik Fatima Felix Fiona Frank "
    "Grace Hana Hassan Helen Henry Igor Ines Isaac Ivan Jack Jana Jonas Julia Karim Kate Kenji Lars Laura Leo "
    "Lucas Maria Marta Max Mei Mia Milan Nadia Nina Noah Olga Omar Oscar Paul Petra Priya Rachel Ravi Rosa Ruth "
    "Samir Sara Simon Sofia Stefan Tara Thomas Tim Vera Victor Walter Yusuf Zoe"
)
HELD_OUT_NAMES = words(
    "Adam Agnes Ahmed Astrid Boris Camila David Dora Edgar Esther Farid Gloria Greta Hugo Ingrid James Joan Kofi "
    "Lena Linda Malik Marco Monica Nora Otto Pablo Pedro Rita Robert Sven Tanya Theo Ursula Wanda Xavier Yara"
)

TRAIN_FRAMES = (
    "{name} is {age} years old and works as a {job} in {city}.",
    "At {age}, {name} moved to {city} with {number} boxes.",
    "{name}, {age}, has lived in {city} for {number} years.",
    "Bus {number} was late, so {name}, who is {age}, walked home.",
    "My neighbour {name} turned {age} last week and got {number} cards.",
    "With {number} points the winner was {name}, aged {age}.",
    "The dog {pet} belongs to {name}, a {job} of {age}.",
    "In {year} a {age}-year-old {job} named {name} opened a shop in {city}.",
    "Meet {name}! Age: {age}. Lucky number: {number}.",
    "{name} (age {age}) is waiting in room {number}.",
    "Everyone in {city} knows {name}, now {age}, and the cat {pet}.",
    "There were {age} candles on the cake of {name}, and {number} guests.",
    "{name} has {number} cousins and a dog named {pet}, and is {age}.",
    'I paid {number} dollars. "How old are you, {name}?" "I am {age}."',
    "The tenant of flat {number} is {name}, a {job} who is {age}.",
    "After {number} years in {city}, {name} came home at the age of {age}.",
    '"I am {age}," said {name}, counting {number} coins.',
    "A {job} since {year}, {name} is {age} today.",
    "{number} emails came in for {name} ({age}) from {city}.",
    "The {job} {name} is {age}; {pet}, the horse, is much younger.",
)
HELD_OUT_FRAMES = (
    "Seat {number} is taken by {name}, a {age}-year-old {job}.",
    "{name} lives at {number} Mill Road in {city} and has just turned {age}.",
    "As a {job} from {city}, {name} is {age} and owns a parrot called {pet}.",
    "Of {number} runners the oldest is {name}, who is {age}.",
    "Guest: {name}. Nights: {number}. Years of age: {age}.",
    "Though already {age}, {name} still swims {number} lengths a day.",
    "When {pet} the cat ran away, {name}, {age}, searched {number} gardens.",
    "They hired {name} in {year}. The new {job} is {age}.",
    "The city of {city} gave {number} euros to {name}, who is {age} years old.",
    "Ticket {number}, passenger {name}, age {age}, to {city}.",
    "{age} years old and full of plans, {name} bought {number} trees.",
    "On page {number} you find {name}, a {job} aged {age}.",
)

JOBS = words("baker nurse teacher pilot farmer lawyer painter driver cook plumber tailor singer")
CITIES = words("Paris London Rome Cairo Lima Oslo Tokyo Boston Delhi Madrid Vienna Dublin")
PETS = words("Rex Bella Luna Rocky Coco Buddy Misty Shadow")


def rows(count: int, seed: int, names: list[str], frames: tuple[str, ...]) -> list[dict]:
    """`count` different rows `{"input": text, "label": {"name", "age"}, "data_source"}`; frames in turn."""
    draw, found = random.Random(seed), {}
    while len(found) < count:
        name, age = draw.choice(names), draw.randint(18, 89)
        sentence = frames[len(found) % len(frames)].format(
            name=name,
            age=age,
            number=draw.choice([n for n in range(2, 100) if n != age]),
            year=draw.randint(1990, 2024),
            job=draw.choice(JOBS),
            city=draw.choice(CITIES),
            pet=draw.choice(PETS),
        )
        found[sentence] = {"name": name, "age": age}
    # The instruction comes first: it is the prefix that all prompts share, so the engine computes it once.
    return [
        {"input": f"{INSTRUCTION}\n\n{sentence}", "label": label, "data_source": "json"}
        for sentence, label in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes OUT_DIR/train.jsonl and OUT_DIR/held_out.jsonl.")
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out_dir.mkdir(parents=True, exist_ok=True)
    for file, made in (
        ("train.jsonl", rows(TRAIN_ROWS, args.seed, TRAIN_NAMES, TRAIN_FRAMES)),
        ("held_out.jsonl", rows(HELD_OUT_ROWS, args.seed + 1, HELD_OUT_NAMES, HELD_OUT_FRAMES)),
    ):
        (args.out_dir / file).write_text("".join(json.dumps(row) + "\n" for row in made))
        print(f"{args.out_dir / file}: {len(made):,} rows, such as\n   {json.dumps(made[0])}")


if __name__ == "__main__":
    main()
