"""Makes the embedded data set and tokenizer: ``python scripts/make_embedded_data.py``.

Everything comes from rules and one seed, so that a second run writes the same conversations.
Each task has far more questions than a tiny model can store but a rule or a fact behind them
that it can learn. Conversations are split by their first question (with the system prompt):
none of the held-out ones is in the training part, while the rule or the fact behind it is.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

SEED = 20240607
TRAIN_ROWS = 2600
VALIDATION_ROWS = 260
VOCABULARY = 1024
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EMBEDDED = Path(__file__).resolve().parents[1] / "src" / "surogate_dataset_chat" / "embedded"

# Qwen's pattern: a digit is a token, so that arithmetic has a chance; words take their leading space.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}"
    "{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}"
    "{%- else %}"
    "{{- message.content + '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

Message = dict[str, str]
Conversation = list[Message]

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Austria": "Vienna",
    "Poland": "Warsaw", "Greece": "Athens", "Egypt": "Cairo", "Kenya": "Nairobi", "Japan": "Tokyo",
    "China": "Beijing", "India": "Delhi", "Peru": "Lima", "Chile": "Santiago", "Cuba": "Havana",
    "Canada": "Ottawa", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Ireland": "Dublin",
    "Portugal": "Lisbon", "Hungary": "Budapest", "Romania": "Bucharest", "Turkey": "Ankara",
}  # fmt: skip
OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("up", "down"), ("day", "night"), ("wet", "dry"),
    ("old", "new"), ("happy", "sad"), ("light", "dark"), ("open", "closed"), ("early", "late"), ("rich", "poor"),
    ("hard", "soft"), ("long", "short"), ("full", "empty"), ("loud", "quiet"), ("left", "right"), ("good", "bad"),
)  # fmt: skip
KINDS = {
    "animal": ("cat", "dog", "horse", "cow", "bird", "lion", "mouse", "frog"),
    "fruit": ("apple", "pear", "plum", "lemon", "grape", "melon", "peach", "cherry"),
    "color": ("red", "blue", "green", "black", "white", "pink", "brown", "gray"),
    "tool": ("hammer", "saw", "drill", "axe", "spade", "rake", "brush", "knife"),
}
WORDS = tuple(word for words in KINDS.values() for word in words)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kim", "Leo", "Mia", "Noah")
JOBS = ("cook", "doctor", "pilot", "teacher", "baker", "painter", "farmer", "driver", "singer", "nurse")
UNITS = (
    ("hours", "minutes", 60), ("minutes", "seconds", 60), ("days", "hours", 24), ("weeks", "days", 7),
    ("meters", "centimeters", 100), ("kilometers", "meters", 1000), ("years", "months", 12), ("dozens", "pieces", 12),
)  # fmt: skip


def _chat(*turns: str, system: str = "") -> Conversation:
    """A conversation from its turns, the user's first."""
    messages = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return messages + [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]


def _article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


# ---------------------------------------------------------------- the tasks: endless streams


def addition(rng: random.Random) -> Conversation:
    """Sums up to 20 + 20."""
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    ask = rng.choice(("What is {} + {}?", "Add {} and {}.", "How much is {} plus {}?", "Compute {} + {}."))
    return _chat(ask.format(a, b), f"{a} + {b} = {a + b}.")


def comparison(rng: random.Random) -> Conversation:
    """The larger or smaller of two numbers below 100."""
    a, b = rng.sample(range(100), 2)
    if rng.random() < 0.5:
        ask = rng.choice(("Which is larger, {} or {}?", "Which number is bigger, {} or {}?"))
        return _chat(ask.format(a, b), f"{max(a, b)} is larger than {min(a, b)}.")
    ask = rng.choice(("Which is smaller, {} or {}?", "Which number is less, {} or {}?"))
    return _chat(ask.format(a, b), f"{min(a, b)} is smaller than {max(a, b)}.")


def counting_on(rng: random.Random) -> Conversation:
    """The next number of a row with an even step."""
    step, first = rng.randint(1, 3), rng.randint(0, 40)
    numbers = [first + step * i for i in range(4)]
    ask = rng.choice(("Which number comes next: {}?", "Continue: {}", "What follows {}?"))
    return _chat(ask.format(", ".join(map(str, numbers))), f"The next number is {first + step * 4}.")


def list_work(rng: random.Random) -> Conversation:
    """Copying, turning round, picking from and counting short lists."""
    words = rng.sample(WORDS, rng.randint(2, 4))
    text = ", ".join(words)
    numbers = {2: "two", 3: "three", 4: "four"}
    return rng.choice(
        (
            _chat(f"Repeat this list: {text}", text),
            _chat(f"Reverse this list: {text}", ", ".join(reversed(words))),
            _chat(f"What is the first word of this list: {text}", f"The first word is {words[0]}."),
            _chat(f"What is the last word of this list: {text}", f"The last word is {words[-1]}."),
            _chat(f"How many words are in this list: {text}", f"There are {numbers[len(words)]} words."),
        )
    )


def kinds(rng: random.Random) -> Conversation:
    """Which kind of thing a word is, and whether it is of a given kind."""
    kind = rng.choice(tuple(KINDS))
    word = rng.choice(KINDS[kind])
    asked = rng.choice(tuple(KINDS)) if rng.random() < 0.5 else kind
    if rng.random() < 0.3:
        ask = rng.choice(("What kind of thing is {}?", "What is {}?", "Is {} an animal, a fruit, a color or a tool?"))
        return _chat(ask.format(word), f"{word} is {_article(kind)}.")
    ask = rng.choice(("Is {} {}?", "Tell me, is {} {}?", "Would you say {} is {}?", "True or false: {} is {}."))
    answer = "Yes" if asked == kind else "No"
    return _chat(ask.format(word, _article(asked)), f"{answer}, {word} is {_article(kind)}.")


def odd_one_out(rng: random.Random) -> Conversation:
    """The word that is of another kind than the rest."""
    kind, other = rng.sample(tuple(KINDS), 2)
    stranger = rng.choice(KINDS[other])
    words = [*rng.sample(KINDS[kind], 2), stranger]
    rng.shuffle(words)
    return _chat(f"Which word does not belong: {', '.join(words)}?", f"{stranger} does not belong.")


def capitals(rng: random.Random) -> Conversation:
    """Capitals of countries, both ways, in a sentence or in one word."""
    country, city = rng.choice(tuple(CAPITALS.items()))
    if rng.random() < 0.3:
        ask = rng.choice(("Which country has the capital {}?", "{} is the capital of which country?"))
        return _chat(ask.format(city), f"{city} is the capital of {country}.")
    ask = rng.choice(
        (
            "What is the capital of {}?", "Name the capital of {}.", "Tell me the capital of {}.",
            "Which city is the capital of {}?", "Do you know the capital of {}?", "I forgot the capital of {}.",
        )
    )  # fmt: skip
    if rng.random() < 0.3:
        return _chat(ask.format(country), city, system="Answer in one word.")
    return _chat(ask.format(country), f"The capital of {country} is {city}.")


def opposites(rng: random.Random) -> Conversation:
    """Opposites of common words, both ways."""
    a, b = rng.sample(rng.choice(OPPOSITES), 2)
    ask = rng.choice(
        ("What is the opposite of {}?", "Give me the opposite of {}.", "Name the opposite of {}.", "Not {} but?")
    )
    if rng.random() < 0.3:
        return _chat(ask.format(a), b, system="Answer in one word.")
    return _chat(ask.format(a), f"The opposite of {a} is {b}.")


def calendar(rng: random.Random) -> Conversation:
    """The day or month before or after another."""
    names = rng.choice((DAYS, MONTHS))
    what = "day" if names is DAYS else "month"
    at = rng.randrange(len(names))
    step, side = rng.choice(((1, "after"), (-1, "before")))
    ask = rng.choice(
        ("Which {what} comes {side} {name}?", "What {what} is {side} {name}?", "Name the {what} {side} {name}.")
    )
    answer = f"{names[(at + step) % len(names)]} comes {side} {names[at]}."
    return _chat(ask.format(what=what, side=side, name=names[at]), answer)


def conversion(rng: random.Random) -> Conversation:
    """Units of time, length and number."""
    large, small, factor = rng.choice(UNITS)
    n = rng.randint(2, 9)
    ask = rng.choice(("How many {1} are {2} {0}?", "Convert {2} {0} to {1}.", "{2} {0} are how many {1}?"))
    return _chat(ask.format(large, small, n), f"{n} {large} are {n * factor} {small}.")


def persona(rng: random.Random) -> Conversation:
    """The system prompt says who the assistant is."""
    name, job = rng.choice(NAMES), rng.choice(JOBS)
    system = rng.choice(("You are {}, {}.", "Your name is {}. You are {}.")).format(name, _article(job))
    about_name = (rng.choice(("What is your name?", "What are you called?")), f"My name is {name}.")
    about_job = (rng.choice(("What is your job?", "What do you do?")), f"I am {_article(job)}.")
    about_both = (rng.choice(("Who are you?", "Please introduce yourself.")), f"I am {name}, {_article(job)}.")
    first, second = rng.sample((about_name, about_job, about_both), 2)
    return _chat(*first, *(second if rng.random() < 0.5 else ()), system=system)


def memory(rng: random.Random) -> Conversation:
    """What the user said in an earlier turn."""
    name, color, animal = rng.choice(NAMES), rng.choice(KINDS["color"]), rng.choice(KINDS["animal"])
    tell = rng.choice(
        ("My name is {} and I have a {} {}.", "Hello, I am {}. I have a {} {}.", "Hi, {} here. I own a {} {}.")
    )
    questions = [
        (rng.choice(("What is my name?", "Who am I?")), f"Your name is {name}."),
        (rng.choice(("What animal do I have?", "Which animal is mine?")), f"You have a {animal}."),
        (f"What color is my {animal}?", f"Your {animal} is {color}."),
    ]
    rng.shuffle(questions)
    asked = [turn for question in questions[: rng.randint(1, 2)] for turn in question]
    return _chat(tell.format(name, color, animal), f"Nice to meet you, {name}!", *asked)


TASKS = (
    addition, comparison, counting_on, list_work, list_work, kinds, odd_one_out, capitals, opposites,
    calendar, conversion, persona, memory,
)  # fmt: skip


def question(conversation: Conversation) -> str:
    """The first question with its system prompt: what conversations are told apart and split by."""
    return "\n".join(message["content"] for message in conversation[: 2 if conversation[0]["role"] == "system" else 1])


def _stream(seed: int) -> Iterator[Conversation]:
    rng = random.Random(seed)
    while True:
        for task in TASKS:
            yield task(rng)


def make_conversations() -> tuple[list[Conversation], list[Conversation]]:
    """(training, held-out) conversations; no question is asked twice, nor in both."""
    wanted = TRAIN_ROWS + VALIDATION_ROWS
    found: dict[str, Conversation] = {}
    for conversation in _stream(SEED):
        found.setdefault(question(conversation), conversation)
        if len(found) == wanted:
            break
    conversations = list(found.values())
    random.Random(SEED + 1).shuffle(conversations)
    return conversations[VALIDATION_ROWS:], conversations[:VALIDATION_ROWS]


def render_jsonl(conversations: list[Conversation]) -> str:
    """One conversation a line."""
    return "".join(json.dumps({"messages": c}, ensure_ascii=False) + "\n" for c in conversations)


def train_tokenizer(conversations: list[Conversation]) -> str:
    """A byte-level BPE over the training texts, as the text of a tokenizer.json."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((m["role"] + "\n" + m["content"] for c in conversations for m in c), trainer)
    return tokenizer.to_str(pretty=False)


def tokenizer_config() -> str:
    """The text of tokenizer_config.json."""
    end_of_text, _, end_of_turn = SPECIAL_TOKENS
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end_of_turn,
        "pad_token": end_of_text,
        "additional_special_tokens": ["<|im_start|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "chat_template": CHAT_TEMPLATE,
    }
    return json.dumps(config, indent=2) + "\n"


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=EMBEDDED, help="directory to write to")
    output: Path = parser.parse_args().output
    train, validation = make_conversations()
    files = {
        "train.jsonl": render_jsonl(train),
        "validation.jsonl": render_jsonl(validation),
        "tokenizer/tokenizer.json": train_tokenizer(train),
        "tokenizer/tokenizer_config.json": tokenizer_config(),
    }
    for name, text in files.items():
        path = output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
