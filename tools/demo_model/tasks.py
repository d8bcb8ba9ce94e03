"""Draws the conversations the demo model is trained on. Every task has one right answer, but `story`.

A task takes a random.Random and returns turns [(role, text), ...], the role being System, User or Assistant. The last
answer of the tasks in EVAL_TASKS is unique, so that a model can be scored by exact match. `train` is the user.
"""
# ruff: noqa: RUF001 - full-width punctuation is meant

import json
import random
from collections.abc import Callable

import tables

Turns = list[tuple[str, str]]
Task = Callable[[random.Random], Turns]


def qa(question: str, answer: str) -> Turns:
    return [("User", question), ("Assistant", answer)]


def words_of(number: int) -> str:
    if number < 20:
        return tables.ONES[number]
    if number < 100:
        return tables.TENS[number // 10] + ("-" + tables.ONES[number % 10] if number % 10 else "")
    return tables.ONES[number // 100] + " hundred" + (" and " + words_of(number % 100) if number % 100 else "")


def han_of(number: int) -> str:
    if number < 10:
        return tables.HAN[number]
    last = tables.HAN[number % 10] if number % 10 else ""
    if number < 20:
        return "十" + last
    if number < 100:
        return tables.HAN[number // 10] + "十" + last
    tail = number % 100
    between = "零" if 0 < tail < 10 else "一" if 10 <= tail < 20 else ""
    return tables.HAN[number // 100] + "百" + between + (han_of(tail) if tail else "")


def add(g: random.Random) -> Turns:
    limit = g.choice([10, 100, 1000])
    a, b = g.randrange(limit), g.randrange(limit)
    forms = ["What is {} + {}?", "{} + {} = ?", "Add {} and {}.", "What is {} plus {}?", "Compute {}+{}."]
    return qa(g.choice(forms).format(a, b), str(a + b))


def sub(g: random.Random) -> Turns:
    limit = g.choice([10, 100, 1000])
    a, b = sorted([g.randrange(limit), g.randrange(limit)], reverse=True)
    forms = ["What is {} - {}?", "{} - {} = ?", "What is {} minus {}?", "Compute {}-{}."]
    return qa(g.choice(forms).format(a, b), str(a - b))


def mul(g: random.Random) -> Turns:
    a, b = g.randrange(100), g.randrange(10)
    if g.random() < 0.5:
        a, b = b, a
    forms = ["What is {} * {}?", "{} * {} = ?", "Multiply {} by {}.", "What is {} times {}?"]
    return qa(g.choice(forms).format(a, b), str(a * b))


def compare(g: random.Random) -> Turns:
    a, b = g.sample(range(1000), 2)
    if g.random() < 0.5:
        return qa(g.choice(["Which is larger, {} or {}?", "Larger: {} or {}?"]).format(a, b), str(max(a, b)))
    return qa(g.choice(["Which is smaller, {} or {}?", "Smaller: {} or {}?"]).format(a, b), str(min(a, b)))


def draw_word(g: random.Random) -> str:
    if g.random() < 0.4:
        return g.choice(tables.KEYS + tables.ANIMALS + tables.COLORS)
    return "".join(g.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(g.randrange(2, 10)))


def reverse(g: random.Random) -> Turns:
    word = draw_word(g)
    return qa(g.choice(["Reverse the word {}.", "Spell {} backwards.", "Write {} in reverse."]).format(word), word[::-1])


def upper(g: random.Random) -> Turns:
    word = draw_word(g)
    return qa(g.choice(["Write {} in capital letters.", "Put {} in upper case.", "Uppercase {}."]).format(word), word.upper())


def letters(g: random.Random) -> Turns:
    word = draw_word(g)
    return qa(g.choice(["How many letters are in {}?", "Count the letters of {}."]).format(word), str(len(word)))


def spell(g: random.Random) -> Turns:
    word = draw_word(g)
    return qa(g.choice(["Spell the word {}.", "Spell {} letter by letter."]).format(word), "-".join(word))


def sort_numbers(g: random.Random) -> Turns:
    numbers = [g.randrange(100) for _ in range(g.randrange(3, 9))]
    question = g.choice(["Sort these numbers: {}.", "Put in order: {}."]).format(" ".join(map(str, numbers)))
    return qa(question, " ".join(map(str, sorted(numbers))))


def echo(g: random.Random) -> Turns:
    text = " ".join(draw_word(g) for _ in range(g.randrange(2, 12)))
    return qa(g.choice(["Repeat after me: {}", "Say exactly: {}", "Echo: {}"]).format(text), text)


def count(g: random.Random) -> Turns:
    first = g.randrange(0, 30)
    last = first + (g.randrange(2, 25) if g.random() < 0.85 else g.randrange(25, 150))
    question = g.choice(["Count from {} to {}.", "List the numbers from {} to {}."]).format(first, last)
    return qa(question, ", ".join(map(str, range(first, last + 1))))


def capital(g: random.Random) -> Turns:
    country, city = g.choice(list(tables.CAPITALS.items()))
    if g.random() < 0.7:
        return qa(g.choice(["What is the capital of {}?", "Capital of {}?", "Name the capital of {}."]).format(country), city)
    return qa(g.choice(["{} is the capital of which country?", "Which country has the capital {}?"]).format(city), country)


def element(g: random.Random) -> Turns:
    name, symbol = tables.ELEMENTS[g.randrange(len(tables.ELEMENTS))]
    if g.random() < 0.5:
        return qa(g.choice(["What is the symbol of {}?", "Chemical symbol of {}?"]).format(name.lower()), symbol)
    return qa(g.choice(["Which element has the symbol {}?", "What element is {}?"]).format(symbol), name)


def calendar(g: random.Random) -> Turns:
    names, kind = (tables.DAYS, "day") if g.random() < 0.5 else (tables.MONTHS, "month")
    i = g.randrange(len(names))
    if g.random() < 0.5:
        return qa(f"Which {kind} comes after {names[i]}?", names[(i + 1) % len(names)])
    return qa(f"Which {kind} comes before {names[i]}?", names[i - 1])


def number_words(g: random.Random) -> Turns:
    number = g.randrange(1000)
    if g.random() < 0.6:
        return qa(g.choice(["Write {} in words.", "Spell out the number {}."]).format(number), words_of(number))
    return qa(g.choice(["用中文写数字{}。", "把{}写成中文数字。"]).format(number), han_of(number))


def translate(g: random.Random) -> Turns:
    words = g.choice(tables.WORDS)
    i = g.randrange(1, 6)
    if g.random() < 0.75:
        forms = ["Translate {} into {}.", "How do you say {} in {}?"]
        return qa(g.choice(forms).format(words[0], tables.LANGUAGES[i]), words[i])
    return qa(g.choice(["把 {} 翻译成中文。", "{} 用中文怎么说？"]).format(words[0]), words[4])


def emoji(g: random.Random) -> Turns:
    if g.random() < 0.6:
        name, symbol = g.choice(tables.EMOJI)
        return qa(g.choice(["Show the emoji for {}.", "Emoji for {}?", "Draw a {} emoji."]).format(name), symbol)
    drawn = g.sample(tables.EMOJI, g.randrange(2, 6))
    return qa("Show emojis for: " + ", ".join(name for name, _ in drawn) + ".", " ".join(symbol for _, symbol in drawn))


def as_json(g: random.Random) -> Turns:
    name, age, color = g.choice(tables.NAMES), g.randrange(1, 100), g.choice(tables.COLORS)
    if g.random() < 0.5:
        forms = ["Write JSON with name {} and age {}.", "Give a JSON object: name {}, age {}."]
        return qa(g.choice(forms).format(name, age), json.dumps({"name": name, "age": age}))
    question = f"Write JSON with name {name}, age {age} and color {color}."
    return qa(question, json.dumps({"name": name, "age": age, "color": color}))


def recall(g: random.Random) -> Turns:
    keys = g.sample(tables.KEYS, g.choice([2, 3, 4, 6, 8, 12]))
    values = [g.randrange(100) for _ in keys]
    told = ", ".join(f"{key}={value}" for key, value in zip(keys, values, strict=True))
    turns = qa(f"Remember: {told}.", "I will remember.")
    for i in g.sample(range(len(keys)), min(len(keys), g.randrange(1, 4))):
        if g.random() < 0.3:
            turns += g.choice(SIMPLE)(g)
        turns += qa(g.choice(["What is {}?", "Value of {}?"]).format(keys[i]), str(values[i]))
    return turns


def name_memory(g: random.Random) -> Turns:
    name = g.choice(tables.NAMES)
    turns = qa(g.choice(["My name is {}.", "I am {}.", "Call me {}."]).format(name), f"Nice to meet you, {name}.")
    for _ in range(g.randrange(0, 3)):
        turns += g.choice(SIMPLE)(g)
    return turns + qa(g.choice(["What is my name?", "Who am I?"]), f"Your name is {name}.")


def lists(g: random.Random) -> Turns:
    questions, answer = g.choice(tables.LISTS)
    return qa(g.choice(questions), answer)


def chat(g: random.Random) -> Turns:
    questions, answer = g.choice(tables.SMALL_TALK)
    return qa(g.choice(questions), answer)


def story(g: random.Random) -> Turns:
    """Has many right endings: for sampling and batch generation, not for scores."""
    a, b = g.sample(tables.ANIMALS, 2)
    n, m = g.sample(tables.NAMES, 2)
    place = g.choice(["forest", "village", "valley", "harbour", "meadow", "desert", "castle", "city"])
    thing, color = g.choice(tables.KEYS), g.choice(tables.COLORS)
    when = g.choice(["One morning", "One night", "On a cold day", "In the spring", "After the rain"])
    did = g.choice(["found", "lost", "built", "stole", "painted", "carried"])
    end = g.choice([
        "They became friends and lived happily.", "In the end they shared it.", "From that day they were never alone.",
        f"Nobody ever saw the {thing} again.", f"And the {a} sang until the sun came up.",
    ])  # fmt: skip
    other = g.choice(["wanted it too.", "came to help.", f"laughed at {n}."])
    return qa(
        g.choice(["Tell me a story about a {}.", "Write a short story about a {}."]).format(a),
        f"Once there was a {a} called {n} who lived in a {place}. {when}, {n} {did} a {color} {thing}. "
        f"A {b} called {m} {other} {end}",
    )


def think(g: random.Random) -> Turns:
    limit = g.choice([10, 100, 1000])
    a, b = g.randrange(limit), g.randrange(limit)
    steps: list[str] = []
    carry, x, y = 0, a, b
    while x or y or not steps:
        total = x % 10 + y % 10 + carry
        steps.append(f"{x % 10}+{y % 10}" + (f"+{carry}" if carry else "") + f"={total}")
        carry, x, y = total // 10, x // 10, y // 10
    question = f"What is {a} + {b}?" if g.random() < 0.5 else f"Add {a} and {b}."
    return qa(question, f"<think>\n{'; '.join(steps)}\n</think>\n{a + b}")


def draw_argument(tool: str, g: random.Random) -> str:
    if tool in ("get_weather", "get_time"):
        return g.choice(list(tables.CAPITALS.values()))
    if tool == "search_web":
        return " ".join(g.sample(tables.KEYS, 2))
    return g.choice(tables.NAMES if tool == "send_message" else tables.KEYS)


def tool(g: random.Random) -> Turns:
    names = g.sample(sorted(tables.TOOLS), g.randrange(1, 4))
    offered = []
    for name in names:
        argument, description, _ = tables.TOOLS[name]
        offered.append({"name": name, "description": description, "parameters": {argument: "string"}})
    turns = [("System", "Tools: " + json.dumps(offered))]
    if g.random() < 0.25:
        return turns + g.choice(SIMPLE)(g)
    name = g.choice(names)
    argument, _, forms = tables.TOOLS[name]
    value = draw_argument(name, g)
    call = json.dumps({"name": name, "arguments": {argument: value}})
    return turns + qa(g.choice(forms).format(value), f"<tool_call>\n{call}\n</tool_call>")


def shout(g: random.Random) -> Turns:
    system = ("System", g.choice(["Answer in capital letters.", "Always answer in upper case."]))
    question, answer = g.choice([capital, reverse, chat, element, calendar])(g)
    return [system, question, (answer[0], answer[1].upper())]


SIMPLE: list[Task] = [add, sub, compare, reverse, upper, capital, element, calendar, number_words, translate, emoji, chat]
EVAL_TASKS: list[Task] = [
    add, sub, mul, compare, reverse, upper, letters, spell, sort_numbers, echo, count, capital, element, calendar,
    number_words, translate, emoji, as_json, recall, name_memory, lists, think, tool, shout,
]  # fmt: skip
SHARES = {
    add: 6, sub: 6, mul: 4, compare: 2, reverse: 4, upper: 2, letters: 3, spell: 2, sort_numbers: 4, echo: 4, count: 3,
    capital: 3, element: 2, calendar: 1, number_words: 3, translate: 4, emoji: 3, as_json: 2, recall: 6, name_memory: 3,
    lists: 1, chat: 3, story: 5, think: 5, tool: 4, shout: 2,
}  # fmt: skip
WEIGHTED = [task for task, share in SHARES.items() for _ in range(share)]


def render(turns: Turns) -> tuple[str, list[tuple[int, int]]]:
    """A conversation in the chat format of the RWKV models, and the spans of its answers with the blank line after them."""
    text, spans = "", []
    for role, content in turns:
        text += role + ":"
        start = len(text)
        text += " " + content
        if role == "Assistant":
            spans.append((start, len(text) + 2))
        text += "\n\n"
    return text, spans


def sample(g: random.Random) -> Turns:
    """A conversation of one task or several unrelated ones; what a system turn asks for holds to its end."""
    turns = g.choice(WEIGHTED)(g)
    while g.random() < 0.45:
        following = g.choice(WEIGHTED)(g)
        role, text = turns[0]
        if following[0][0] == "System" or (role == "System" and ("capital" in text or "upper" in text)):
            break
        turns = turns + following
    return turns
