"""The questions: phrasings the model is trained on, phrasings held out to test it, and the noise put on the former.

A template is filled with `{word}`, `{Word}` (capitalised) and, in those for nouns, `{a}` (the word with its article).
"""

import random

from models.build.wordnet import Entry

TRAINED = (
    "What does {word} mean?",
    "What does the word {word} mean?",
    'What does the word "{word}" mean?',
    'What does "{word}" mean?',
    "What is {word}?",
    "What is the meaning of {word}?",
    "What is the definition of {word}?",
    'What is the meaning of the word "{word}"?',
    "What is meant by {word}?",
    "What do people mean by {word}?",
    "What do you call {word}?",
    "What's {word}?",
    "Define {word}.",
    "Define the word {word}.",
    'Define "{word}".',
    "define: {word}",
    "{word}?",
    "{Word}?",
    "{word}",
    "{Word}",
    "meaning of {word}",
    "{word} definition",
    "{word} meaning",
    "{Word}: what does it mean?",
    "Explain {word}.",
    "Explain the word {word} to me.",
    "Tell me what {word} means.",
    "Tell me the meaning of {word}.",
    "Tell me about {word}.",
    "Can you define {word}?",
    "Can you explain {word} to me?",
    "Could you tell me what {word} means?",
    "Do you know what {word} means?",
    "I want to know what {word} means.",
    "I do not understand the word {word}.",
    "I saw the word {word} in a book. What does it mean?",
    "How would you define {word}?",
    "How does a dictionary define {word}?",
    "Describe {word}.",
    "Look up {word}.",
    "And {word}?",
    "What about {word}?",
)
TRAINED_NOUNS = (
    "What is {a}?",
    "What's {a}?",
    "what is {a}",
    "What exactly is {a}?",
    "Define {a}.",
    "Describe {a}.",
    "Explain what {a} is.",
    "Tell me what {a} is.",
    "Tell me about {a}.",
    "Can you tell me what {a} is?",
    "Do you know what {a} is?",
    "I want to know what {a} is.",
    "And {a}?",
    "What about {a}?",
    "{a}?",
)
HELD_OUT = (
    "Give me the definition of {word}.",
    "Please explain what {word} means.",
    "What would you say {word} means?",
    "Could you define the word {word} for me?",
    "I wonder what {word} means.",
)
HELD_OUT_NOUNS = (
    "Could you tell me what {a} is?",
    "So what is {a}, exactly?",
)
OPENINGS = ("Please: ", "Hi. ", "Hello! ", "Hey, ", "OK. ", "Next question: ", "Quick question: ", "Thanks. ", "Now, ")
ENDINGS = (" Thanks!", " Thank you.", " Please.", " Be brief.", " In one sentence.", " I am curious.")
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a dictionary. Answer with the meaning of the word.",
    "You are a friendly and careful teacher. Answer each question in one short sentence.",
    "Answer briefly.",
)
SMALL_TALK = (
    ("Hello", "Hello! Ask me what a word means."),
    ("Hello!", "Hello! Ask me what a word means."),
    ("Hi", "Hello! Ask me what a word means."),
    ("Who are you?", "I am a small demo model. Ask me what a word means."),
    ("What can you do?", "I know what some two thousand common words mean. Ask me about one."),
    ("Thanks!", "You are welcome."),
    ("Thank you.", "You are welcome."),
)
_VOWEL_SOUND = ("a", "e", "i", "o", "u", "hour", "honor")
_CONSONANT_SOUND = ("uni", "use", "ewe", "one", "once", "eu", "ut")


def with_article(word: str) -> str:
    """The word after `a` or `an`."""
    vowel = word.startswith(_VOWEL_SOUND) and not word.startswith(_CONSONANT_SOUND)
    return f"{'an' if vowel else 'a'} {word}"


def fill(template: str, entry: Entry) -> str:
    """The template's question about the entry."""
    return template.format(word=entry.word, Word=entry.word.capitalize(), a=with_article(entry.word))


def trained_for(entry: Entry) -> tuple[str, ...]:
    """The training templates that suit the entry's part of speech."""
    return TRAINED + TRAINED_NOUNS if entry.pos == "n" else TRAINED


def held_out_for(entry: Entry) -> tuple[str, ...]:
    """The held-out templates that suit the entry's part of speech."""
    return HELD_OUT + HELD_OUT_NOUNS if entry.pos == "n" else HELD_OUT


def sample_question(entry: Entry, rng: random.Random, noise: float) -> str:
    """A trained phrasing; each kind of noise (case, end mark, opening, ending) is put on it with chance `noise`."""
    question = fill(rng.choice(trained_for(entry)), entry)
    if rng.random() < noise:
        question = question.rstrip("?.")
    if rng.random() < noise:
        question = question.lower()
    if rng.random() < noise:
        opening = rng.choice(OPENINGS)
        question = opening + (question[0].lower() + question[1:] if opening.endswith((", ", ": ")) else question)
    if rng.random() < noise:
        question += rng.choice(ENDINGS)
    return question
