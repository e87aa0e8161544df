"""What models/tiny learns: random conversations with one right answer, in the shape of chat completions.

    python models/tasks.py [N]        shows N conversations

A kind of question is a function below KINDS: it draws its numbers or words, and returns the question, what is thought
at low, medium and high effort, and the answer. Reasoning is written so that each step needs only what is near: sums
run over digits written backwards, words in double quotes are letters (the tokenizer splits them so), comparisons go
digit by digit. What is asked about is drawn either from the values and phrasings of training or from those held out
(`reserved`, by hash: one in 16); models/questions.jsonl asks only about the latter.
"""
import datetime
import hashlib
import json
import random
import sys

EFFORTS = ["low", "medium", "high"]
DAYS = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"]
MONTH_DAYS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
FIRST_YEAR, LAST_YEAR = 2000, 2049

WORDS = """able about above acid actor after again agent air album alarm alert alone amber angel angle animal ankle
answer apple april apron arena arm armor army arrow art ask aunt autumn axe baby back bacon badge bag baker ball
bamboo banana band bank barn basin basket bath beach bean bear beard bed bee beer bell belt bench berry bike bird
biscuit black blanket block blood blue board boat body bone book boot border bottle bowl box boy brain branch brave
bread breeze brick bridge bright broom brown brush bubble bucket build bus bush butter button cabbage cabin cable cake
camel camera camp canal candle candy canoe car card carpet carrot castle cat cave chain chair chalk cheese cherry
chess chest chicken child chimney circle city class clay clean cliff clock cloth cloud coast coat coffee coin cold
color comb cook cookie copper coral corn cotton couch cousin cow crab cream creek crow crown cup curtain dance dark
dawn day deer desk diamond dinner dish doctor dog doll dolphin donkey door dragon dream dress drink drum duck dust
eagle ear earth east egg eight elbow engine evening eye face fall farm father feather fence fern field fig finger fire
fish flag flame floor flour flower flute fly fog food foot forest fork fox frame friend frog fruit garden garlic gate
ghost giant gift ginger girl glass globe glove goat gold goose grape grass green guitar hair hammer hand happy harbor
hat hawk head heart heavy helmet hen herb hero hill honey hood hook horn horse hotel hour house ice idea ink iron
island jacket jar jelly jewel joke juice jump jungle kettle key king kitchen kite kitten knee knife ladder lady lake
lamb lamp language leaf lemon letter level library light lily lime lion lip little lizard lobster lock log lunch
machine magic magnet mango map maple marble market mask meadow meat melon metal milk mill mirror money monkey moon
morning moss mother motor mountain mouse mouth mud muffin museum music nail name napkin neck needle nest net night
noodle north nose number nurse nut oak ocean office oil olive onion orange otter oven owl page paint palace palm panda
paper parrot party path peach pear pebble pen pencil penguin people pepper piano picture pig pillow pilot pine pink
pirate pizza planet plant plate plum pocket poem poet pond pony potato prince pumpkin puppy purple queen quick quiet
rabbit radio rain raven red ribbon rice ring river road robin robot rock roof room root rope rose round ruler sack
saddle sail salad salmon salt sand school sea seed seven shadow shark sheep shelf shell ship shirt shoe shop shovel
silk silver sister six skin sky sleep small smile smoke snail snake snow soap sock sofa soil song soup south spider
spoon spring square stairs star station steam stick stone storm stove street student sugar summer sun swan sweet sword
table tailor tea teacher ten tent theater thread three throat ticket tiger toast tomato tooth tower town toy train
tree truck trumpet tulip turkey turtle uncle valley vase village violin voice wagon wall walnut watch water wave west
whale wheat wheel whistle white wind window wine wing winter wolf wood wool word world worm yard yellow young zebra
zero strawberry blueberry raspberry chocolate butterfly crocodile elephant watermelon pineapple breakfast adventure
wonderful telephone furniture dictionary helicopter committee balloon""".split()
NAMES = """Ada Alan Alice Amy Anna Ben Bob Carl Clara Cleo Dan David Diana Ella Emma Eric Eva Finn Frank Fred Grace Hans
Helen Henry Ida Ivan Jack Jane John Julia Karl Kate Kim Laura Leo Lena Liam Linus Lisa Lucy Maria Mark Max Mia Mike Nina
Noah Nora Olga Oscar Otto Paul Peter Rosa Ruth Sam Sara Simon Sofia Theo Tim Tom Uma Vera Victor Wendy Zoe""".split()


def reserved(*key):
    """One in 16: held out of training."""
    return hashlib.md5(repr(key).encode()).digest()[0] < 16


def draw(held, make, key):
    """Values made until they are held out, or until they are not."""
    while True:
        values = make()
        if reserved(*key(*values)) == held:
            return values


# ---- values

def number(rng):
    """Of one to six digits, all lengths alike, sometimes with many zeros, nines or repetitions."""
    n = rng.randint(1, 6)
    if rng.random() < 0.2:
        some = rng.choice(["09", "19", "0123456789"[rng.randrange(10)], "01", "89", "5"])
        return int("".join(rng.choice(some) for _ in range(n)))
    return rng.randrange(10 ** (n - 1) if n > 1 else 0, 10 ** n)


def numbers(rng):
    """Two; sometimes of one length, or with the same beginning."""
    a, b, how = number(rng), number(rng), rng.random()
    text = str(a)
    if how < 0.35:
        b = int("".join(rng.choice("0123456789") for _ in text))
    elif how < 0.5:
        i = rng.randrange(len(text))
        b = int(text[:i] + "".join(rng.choice("0123456789") for _ in text[i:]))
    return (a, b) if rng.random() < 0.5 else (b, a)


def letters(rng):
    """What looks like a word, or just letters."""
    n = rng.choice([2, 3, 4, 5, 6, 7, 8, 8, 9, 10])
    if rng.random() < 0.5:
        some = rng.choice(["abcdefghijklmnopqrstuvwxyz"] * 2 + ["".join(rng.sample("abcdefghijklmnopqrstuvwxyz", 3))])
        return "".join(rng.choice(some) for _ in range(n))
    start = rng.random() < 0.5
    return "".join(rng.choice("aeiou" if (i + start) % 2 else "bcdfghjklmnprstvwz") for i in range(n))


def word(rng, held):
    make = (lambda: (rng.choice(WORDS),)) if rng.random() < 0.5 else (lambda: (letters(rng),))
    return draw(held, make, lambda w: ("word", w))[0]


def date(rng):
    first = datetime.date(FIRST_YEAR, 1, 1).toordinal()
    if rng.random() < 0.15:  # around the ends of months
        year, month = rng.randint(FIRST_YEAR, LAST_YEAR - 1), rng.randint(1, 12)
        return datetime.date(year, month, 1) + datetime.timedelta(rng.randint(-2, 1) if year > FIRST_YEAR else 0)
    return datetime.date.fromordinal(first + rng.randrange(365 * 49))


# ---- reasoning: each returns the text at an effort

def compare_steps(a, b, effort):
    x, y, pairs = str(a), str(b), []
    for p, q in zip(x, y):
        if len(x) == len(y):
            pairs.append(f"{p}{sign(int(p), int(q))}{q}")
            if p != q:
                break
    if effort == "low":
        return f"{len(x)},{len(y)}: {' '.join(pairs)}{' ' if pairs else ''}so {sign(a, b)}"
    text = f"{x} has {len(x)} digit{'s' * (len(x) > 1)}, {y} has {len(y)}. "
    if effort == "high":
        text += "The lengths are equal, so I go from left to right:\n" if pairs else "The longer number is larger.\n"
        text += "".join(f"digit {i + 1}: {p}\n" for i, p in enumerate(pairs))
    elif pairs:
        text += f"From the left: {', '.join(pairs)}. "
    return text + f"So {x} {sign(a, b)} {y}."


def sign(a, b):
    return "<" if a < b else ">" if a > b else "="


def columns(a, b, plus):
    """Both backwards, of one length, and for each column its digits, what is carried in, the digit and the carry out."""
    x, y, carry, steps = str(a)[::-1], str(b)[::-1], 0, []
    n = max(len(x), len(y))
    x, y = x.ljust(n, "0"), y.ljust(n, "0")
    for p, q in zip(x, y):
        s = int(p) + int(q) + carry if plus else int(p) - int(q) - carry
        steps.append((p, q, carry, s % 10, int(not 0 <= s <= 9)))
        carry = steps[-1][4]
    if carry:
        assert plus
        steps.append(("0", "0", 1, 1, 0))
    return x, y, steps


def sum_steps(a, b, effort):
    x, y, steps = columns(a, b, True)
    back = "".join(str(d) for *_, d, _ in steps)
    assert int(back[::-1]) == a + b
    if effort == "low":
        return f"{x}+{y}: {' '.join(f'{c}{d}' for *_, d, c in steps)}"
    if effort == "medium":
        return (f"Backwards: {x}, {y}. {', '.join(f'{p}+{q}+{i}={10 * c + d}' for p, q, i, d, c in steps)}. "
                f"Backwards: {back}. Result: {a + b}.")
    lines = "".join(f"{p} + {q} + carry {i} = {10 * c + d}: write {d}, carry {c}\n" for p, q, i, d, c in steps)
    return (f"I add {a} and {b} from the right, column by column.\nBackwards: {x} and {y}\n{lines}"
            f"The digits backwards: {back}\nTurned around: {a + b}")


def difference_steps(a, b, effort):
    text = compare_steps(a, b, effort) + ("\n" if effort == "high" else ". " if effort == "low" else " ")
    large, small = max(a, b), min(a, b)
    x, y, steps = columns(large, small, False)
    back = "".join(str(d) for *_, d, _ in steps)
    assert int(back[::-1]) == large - small
    if effort == "low":
        return text + f"{x}-{y}: {' '.join(f'{c}{d}' for *_, d, c in steps)} {back[::-1]}"
    if a < b:
        text += f"The result is negative. "
    if effort == "medium":
        return text + (f"Backwards: {x}, {y}. {', '.join(f'{p}-{q}-{i}={d} borrow {c}' for p, q, i, d, c in steps)}. "
                       f"Backwards: {back}. Turned around: {back[::-1]}. Result: {a - b}.")
    lines = "".join(f"{p} - {q} - borrowed {i}: write {d}, borrow {c}\n" for p, q, i, d, c in steps)
    return text + (f"I subtract {small} from {large} from the right, column by column.\nBackwards: {x} and {y}\n"
                   f"{lines}The digits backwards: {back}\nTurned around: {back[::-1]}\nResult: {a - b}")


def spelled(w, effort):
    return {"low": f'"{w}"', "medium": f'Letters: "{w}".', "high": f'I spell it: "{w}".'}[effort]


def numbered(text):
    return ", ".join(f"{i + 1} {c}" for i, c in enumerate(text))


def running(w, letter):
    """Each letter with how many there were so far of this one; of any if None."""
    n, out = 0, []
    for c in w:
        n += letter in (c, None)
        out.append((c, n))
    return out


def weekday_steps(day, effort):
    """Codes of year and month, and the day, add up to the day of the week, modulo 7."""
    year = (datetime.date(day.year, 1, 1).isoweekday() - 1) % 7
    month = (datetime.date(day.year, day.month, 1) - datetime.date(day.year, 1, 1)).days % 7
    total, found = year + month + day.day, day.isoweekday() % 7
    assert total % 7 == found
    if effort == "low":
        return f"{year}+{month}+{day.day}={total} mod 7 = {found}"
    leap = year_is_leap(day.year)
    if effort == "medium":
        return (f"Year {day.year}: {year}. Month {day.month}{' of a leap year' * leap}: {month}. "
                f"{year}+{month}+{day.day}={total}. {total} mod 7 = {found}: {DAYS[found]}.")
    return (f"The year {day.year} is {'' if leap else 'not '}a leap year, its number is {year}.\n"
            f"The number of month {day.month} is {month}, the day is {day.day}.\n"
            f"{year} + {month} + {day.day} = {total}\n{total} = {total // 7} * 7 + {found}\n"
            f"Day {found} is {DAYS[found]}.")


def year_is_leap(year):
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def month_length(year, month):
    return 29 if month == 2 and year_is_leap(year) else MONTH_DAYS[month - 1]


def shift_steps(day, n, effort):
    """n days later, or earlier if negative; at most 28, so that no month is skipped."""
    then, text = day + datetime.timedelta(n), []
    at, length = day.day + n, month_length(day.year, day.month)
    if effort == "high":
        text.append(f"I start at {day}, day {day.day} of month {day.month}.")
    text.append(f"{day.day} {'-' if n < 0 else '+'} {abs(n)} = {at}")
    if at > length:
        text.append(f"month {day.month} has {length} days, {at} - {length} = {at - length}")
        at -= length
        if effort == "high":
            text.append(f"the next month is {day.month % 12 + 1}")
    elif at < 1:
        before = day.replace(day=1) - datetime.timedelta(1)
        text.append(f"month {before.month} has {before.day} days, {before.day} {'-' if at < 0 else '+'} {abs(at)} = "
                    f"{at + before.day}")
        at += before.day
        if effort == "high":
            text.append("that is the month before")
    assert at == then.day
    text.append(str(then))
    return ("; " if effort == "low" else "\n" if effort == "high" else ". ").join(text) + "." * (effort == "medium")


# ---- phrasings

OPENINGS = ["", "", "", "", "Please tell me: ", "Hey, ", "Hi! ", "Now ", "Next question: ", "Tell me, ", "Quick: ",
            "OK. ", "I have a question. ", "And ", "Hello, "]
CLOSINGS = ["", "", "", "", " Thanks!", " Please.", " Thank you.", " Think well."]
T = {
    "add": ["What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} = ?", "Add {a} and {b}.", "What is {a} plus {b}?",
            "How much is {a} + {b}?", "Calculate {a} + {b}.", "Compute {a} plus {b}.", "What is the sum of {a} and {b}?",
            "Can you add {a} and {b}?", "What do {a} and {b} make together?", "Find {a} + {b}.", "Sum {a} and {b}."],
    "sub": ["What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} = ?", "Subtract {b} from {a}.",
            "What is {a} minus {b}?", "How much is {a} - {b}?", "Calculate {a} - {b}.", "Compute {a} minus {b}.",
            "Take {b} away from {a}.", "Can you subtract {b} from {a}?", "Find {a} - {b}.",
            "What is left of {a} without {b}?"],
    "mul": ["What is {a} * {b}?", "{a} * {b}", "What is {a} times {b}?", "Multiply {a} by {b}.", "Multiply {a} and {b}.",
            "Calculate {a} * {b}.", "How much is {a} times {b}?", "{a}*{b}", "What is the product of {a} and {b}?"],
    "div": ["What is {a} / {b}?", "{a} / {b}", "Divide {a} by {b}.", "What is {a} divided by {b}?",
            "Calculate {a} / {b}.", "How much is {a} divided by {b}?", "{a}/{b}"],
    "add_that": ["Add {b} to that.", "Now add {b}.", "Plus {b}?", "And {b} more?", "Add {b} to the result."],
    "sub_that": ["Subtract {b} from that.", "Now subtract {b}.", "Minus {b}?", "And {b} less?",
                 "Subtract {b} from the result."],
    "parity_that": ["Is that even or odd?", "Is the result even?", "Is that odd?", "Is it even or odd?"],
    "larger": ["Which is larger, {a} or {b}?", "Which number is bigger: {a} or {b}?", "What is larger, {a} or {b}?",
               "Compare {a} and {b}.", "Compare {a} with {b}.", "Which of {a} and {b} is the larger number?",
               "Which one is greater, {a} or {b}?", "{a} or {b}: which is more?"],
    "smaller": ["Which is smaller, {a} or {b}?", "Which number is less: {a} or {b}?", "{a} or {b}: which is less?",
                "Which of {a} and {b} is the smaller number?", "What is smaller, {a} or {b}?"],
    "is_larger": ["Is {a} larger than {b}?", "Is {a} greater than {b}?", "Is {a} more than {b}?", "Is {a} > {b}?",
                  "Is {a} bigger than {b}?"],
    "is_smaller": ["Is {a} smaller than {b}?", "Is {a} less than {b}?", "Is {a} < {b}?"],
    "reverse": ["Reverse the word {w}.", "Reverse {w}.", "Write {w} backwards.", "Spell {w} backwards.",
                "What is {w} backwards?", "Turn the word {w} around.", "Can you reverse {w}?", "What is {w} reversed?"],
    "reverse_digits": ["Reverse the digits of {a}.", "Reverse {a}.", "Write {a} backwards.", "What is {a} backwards?",
                       "Turn the number {a} around.", "Write the digits of {a} in reverse order."],
    "sort": ["Sort the letters of {w}.", "Sort the letters in {w}.", "Put the letters of {w} in order.",
             "Order the letters of the word {w}.", "What are the letters of {w} in alphabetical order?",
             "Sort the letters of the word {w} alphabetically."],
    "sort_digits": ["Sort the digits of {a}.", "Sort the digits in {a}.", "Put the digits of {a} in order.",
                    "Order the digits of {a}.", "What are the digits of {a} in ascending order?"],
    "sort_words": ["Sort these words: {list}.", "Sort {list}.", "Put these words in order: {list}.",
                   "Sort the words {list} alphabetically.", "What is the alphabetical order of {list}?"],
    "count": ["How many {c}'s are in {w}?", "How many times does {c} appear in {w}?", "Count the letter {c} in {w}.",
              "How often is the letter {c} in the word {w}?", "How many {c} are there in {w}?",
              "How many times is the letter {c} in {w}?", "Count the {c}'s in {w}."],
    "length": ["How many letters does {w} have?", "How long is the word {w}?", "Count the letters of {w}.",
               "How many letters are in {w}?", "How many letters are there in the word {w}?"],
    "parity": ["Is {a} even or odd?", "Is {a} even?", "Is {a} odd?", "Is the number {a} odd or even?",
               "Tell me if {a} is even.", "Even or odd: {a}?", "What is the parity of {a}?"],
    "weekday": ["What day of the week is {d}?", "Which day of the week is {d}?", "What weekday is {d}?",
                "On which day of the week is {d}?", "{d}: which weekday is it?", "What day is {d}?"],
    "weekday_today": ["What day of the week is it?", "What day of the week is today?", "Which weekday is it today?",
                      "What day is it today?", "What day is today?"],
    "days_after": ["What day is {n} days after {d}?", "What weekday is {n} days after {d}?",
                   "Which day comes {n} days after {d}?", "If today is {d}, what day is it in {n} days?",
                   "It is {d}. What day is it {n} days later?"],
    "days_before": ["What day is {n} days before {d}?", "What weekday is {n} days before {d}?",
                    "Which day comes {n} days before {d}?", "If today is {d}, what day was it {n} days ago?"],
    "after": ["What date is {n} days after {d}?", "What is {d} plus {n} days?", "Which date comes {n} days after {d}?",
              "Add {n} days to {d}.", "What is the date {n} days after {d}?"],
    "before": ["What date is {n} days before {d}?", "What is {d} minus {n} days?",
               "Which date comes {n} days before {d}?", "Subtract {n} days from {d}.",
               "What is the date {n} days before {d}?"],
    "in_days": ["What date is it in {n} days?", "What is the date in {n} days?", "Which date is {n} days from today?",
                "What date is {n} days from now?"],
    "ago": ["What date was it {n} days ago?", "What was the date {n} days ago?", "Which date was {n} days ago?"],
    "tomorrow": ["What date is tomorrow?", "What is the date tomorrow?", "What is tomorrow's date?"],
    "yesterday": ["What date was yesterday?", "What was the date yesterday?", "What was yesterday's date?"],
    "today": ["What is the date?", "What date is it?", "What date is it today?", "What is today's date?",
              "What is the date today?", "Which date is today?", "Tell me today's date."],
    "name": ["My name is {x}.", "I am {x}.", "I'm {x}.", "Call me {x}.", "You can call me {x}.", "My name is {x}!"],
    "my_name": ["What is my name?", "Who am I?", "Do you know my name?", "What's my name?", "Do you remember my name?",
                "How am I called?"],
    "who": ["Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "What's your name?",
            "Introduce yourself.", "Are you a robot?", "Are you a person?", "How are you called?", "Are you ChatGPT?",
            "Who made you?", "Who trained you?", "How large are you?", "How big are you?", "Where do you come from?"],
    "can": ["What can you do?", "What can I ask you?", "How can you help me?", "What are you able to do?", "Help",
            "What do you know?", "What are you good at?", "Can you help me?", "What should I ask you?",
            "What kind of questions can you answer?", "What are your skills?"],
    "how": ["How are you?", "How are you today?", "How do you do?", "How is it going?", "Are you well?",
            "How do you feel?"],
    "thanks": ["Thanks!", "Thank you.", "Thank you very much!", "Thanks a lot.", "Great, thanks.", "Thank you, tiny.",
               "Many thanks!", "Good job!", "Well done.", "Very good.", "Nice!", "That is right.", "Great!", "Cool."],
    "bye": ["Bye!", "Goodbye.", "See you later.", "Good night!", "See you!", "Goodbye, tiny.", "I have to go.",
            "Bye bye.", "Until tomorrow!", "That is all."],
}
GREETINGS = ["Hello", "Hi", "Hey", "Good morning", "Good evening", "Good afternoon", "Hi there", "Hello there", "Hey there",
             "Greetings", "Howdy", "Good day", "Hello hello", "Hi again", "Welcome"]
SELF = ["I am tiny, a very small language model that was trained to show how infer works.",
        "I can add, subtract and compare numbers, reverse, sort and count letters, and work with dates.",
        "I am fine, thank you. How can I help you?", "You are welcome!", "Goodbye!"]
HELLO = "Hello! How can I help you?"
SORRY = "I am sorry, I cannot do that. Ask me what I can do."
NO_TOOL = "I am sorry, I cannot multiply or divide without a calculator."
NO_DATE = "I am sorry, nobody told me the date."
WISHES = ["Write {}.", "Can you write {}?", "Please write {} for me.", "I need {}.", "Give me {}.", "Can you make {}?",
          "Show me {}.", "I want {}.", "Could you send me {}?", "Make me {}."]
WISHED = ["a poem", "a story", "a song", "a letter to my boss", "a program in Python", "some code", "a joke", "an essay",
          "a recipe", "a picture of a cat", "a travel plan", "a speech", "an email", "a list of books", "a novel",
          "a website", "a game", "a cup of coffee", "a haiku", "a movie script", "some money", "a new car", "a drawing"]
FACTS = ["What is {}?", "Tell me about {}.", "Explain {}.", "Do you know {}?", "What do you know about {}?",
         "Can you explain {}?", "I want to know more about {}.", "What do you think about {}?", "Describe {}."]
ABOUT = ["the capital of France", "the weather", "the news", "quantum physics", "the meaning of life", "the stock market",
         "the price of gold", "history", "football", "the president", "love", "politics", "the moon landing",
         "the population of China", "the speed of light", "my bank account", "cooking", "the best movie", "music",
         "the universe", "photosynthesis", "the time", "chemistry", "the French Revolution", "black holes", "Paris"]
OTHER = ["Translate hello to French.", "Who is the president?", "What is the weather like?", "Will it rain tomorrow?",
         "What time is it?", "Who won the game?", "Translate this to German.", "Play some music.", "Open the door.",
         "Send an email.", "Book a flight.", "Where is Paris?", "What should I eat?", "Who wrote Hamlet?",
         "Fix my code.", "Search the web.", "Call my mother.", "Do my homework.", "What is the square root of two?",
         "How do I cook rice?", "Why is the sky blue?", "Is there life on Mars?", "Read my mail.", "Drive me home.",
         "Summarize this book.", "Sing a song.", "Buy me a ticket.", "What is in the news?", "Turn on the light."]


def phrase(rng, held, kind, forms=None, **values):
    """A wording; those held out are combinations of opening, form and closing that training does not have."""
    want = held and (held == "phrase" or rng.random() < 1 / 3)
    opening, form, closing = draw(want, lambda: (rng.choice(OPENINGS), rng.choice(forms or T[kind]),
                                                 rng.choice(CLOSINGS)), lambda *combo: ("phrase", *combo))
    text = form.format(**values)
    if opening.endswith((", ", "Now ", "And ")) and text[:2] not in ("I ", "I'") and "{x}" not in form[:3]:
        text = text[0].lower() + text[1:]
    if closing and text[-1] not in ".?!":
        text += "."
    text = opening + text + closing
    how = rng.random()
    if how < 0.06 and "{x}" not in form and "{list}" not in form:
        text = text.lower()
    elif how < 0.14 and len(text) > 4:
        text = text.rstrip(".?!")
    return text


def quoted(rng, w):
    return rng.choice(['"{}"', '"{}"', "{}", "'{}'", "{}"]).format(w)


# ---- kinds: each returns question, {effort: thinking}, answer; and the number that "that" means next, or None

def thinking(steps):
    return {e: steps(e) for e in EFFORTS}


def add(rng, held, state):
    that = state.get("that")
    if that is not None and rng.random() < 0.6:
        a, b = draw(held, lambda: (that, number(rng)), lambda a, b: ("add", min(a, b), max(a, b)))
        return (phrase(rng, held, "add_that", b=b),
                thinking(lambda e: ("" if e == "low" else "The last result is ") + f"{a}. {sum_steps(a, b, e)}"),
                f"{a} + {b} = {a + b}", a + b)
    a, b = draw(held, lambda: numbers(rng), lambda a, b: ("add", min(a, b), max(a, b)))
    return phrase(rng, held, "add", a=a, b=b), thinking(lambda e: sum_steps(a, b, e)), f"{a} + {b} = {a + b}", a + b


def sub(rng, held, state):
    that = state.get("that")
    if that is not None and rng.random() < 0.6:
        a, b = draw(held, lambda: (that, number(rng)), lambda a, b: ("sub", a, b))
        return (phrase(rng, held, "sub_that", b=b),
                thinking(lambda e: ("" if e == "low" else "The last result is ") + f"{a}. {difference_steps(a, b, e)}"),
                f"{a} - {b} = {a - b}", a - b)
    a, b = draw(held, lambda: numbers(rng), lambda a, b: ("sub", a, b))
    return phrase(rng, held, "sub", a=a, b=b), thinking(lambda e: difference_steps(a, b, e)), f"{a} - {b} = {a - b}", a - b


def compare(rng, held, state):
    a, b = draw(held, lambda: numbers(rng), lambda a, b: ("compare", a, b))
    kind = rng.choice(["larger", "larger", "smaller", "is_larger", "is_smaller"])
    if a == b:
        answer = f"{a} and {b} are equal."
    elif kind == "larger":
        answer = f"{max(a, b)} is larger than {min(a, b)}."
    elif kind == "smaller":
        answer = f"{min(a, b)} is smaller than {max(a, b)}."
    else:
        yes = (a > b) == (kind == "is_larger")
        answer = f"{'Yes' if yes else 'No'}, {a} is {'larger' if a > b else 'smaller'} than {b}."
    return phrase(rng, held, kind, a=a, b=b), thinking(lambda e: compare_steps(a, b, e)), answer, None


def parity(rng, held, state):
    that = state.get("that")
    if that is not None and rng.random() < 0.6 and not held:
        a, question, start = that, phrase(rng, held, "parity_that"), "The last result is {}. "
    else:
        (a,), start = draw(held, lambda: (number(rng),), lambda a: ("parity", a)), ""
        question = phrase(rng, held, "parity", a=a)
    d, what = a % 10, "odd" if a % 2 else "even"
    think = {"low": f"{d}: {what}", "medium": f"The last digit of {a} is {d}. {d} is {what}.",
             "high": f"A number is even if its last digit is even.\nThe last digit of {a} is {d}.\n{d} is {what}, so {a} "
                     f"is {what}."}
    return question, {e: start.format(a) + t for e, t in think.items()}, f"{a} is {what}.", None


def reverse(rng, held, state):
    if rng.random() < 0.35:
        a = str(draw(held, lambda: (number(rng),), lambda a: ("reverse", a))[0])
        return phrase(rng, held, "reverse_digits", a=a), {
            "low": f"{a}: {a[::-1]}", "medium": f"Digits: {a}. From the end: {a[::-1]}.",
            "high": f"I number the digits: {numbered(a)}\nFrom the end: "
                    f"{', '.join(numbered(a).split(', ')[::-1])}\nTogether: {a[::-1]}"}, f"{a} reversed is {a[::-1]}.", None
    w = word(rng, held)
    r = w[::-1]
    return phrase(rng, held, "reverse", w=quoted(rng, w)), {
        "low": f'"{w}": "{r}"', "medium": f'Letters: "{w}". From the end: "{r}".',
        "high": f'I spell it: "{w}"\nI number the letters: {numbered(w)}\nFrom the end: '
                f'{", ".join(numbered(w).split(", ")[::-1])}\nTogether: "{r}"'}, f'"{w}" reversed is "{r}".', None


def sort(rng, held, state):
    if rng.random() < 0.35:
        a = str(draw(held, lambda: (number(rng),), lambda a: ("sort", a))[0])
        kind, values, text, start = "sort_digits", {"a": a}, a, f"Digits: {a}"
        name = "digit"
    else:
        w = word(rng, held)
        kind, values, text, start, name = "sort", {"w": quoted(rng, w)}, f'"{w}"', f'Letters: "{w}"', "letter"
    # each with its place, so that what comes next can be looked up: the same character's next place, or the next character
    plain = text.strip('"')
    places = [f"{c} {i + 1}" for i, c in enumerate(plain)]
    order, s = sorted(places, key=lambda p: (p[0], int(p[2:]))), text.replace(plain, "".join(sorted(plain)))
    return phrase(rng, held, kind, **values), {
        "low": f"{text}: {', '.join(places)}. In order: {', '.join(order)}",
        "medium": f"{start}. With their places: {', '.join(places)}. In order: {', '.join(order)}.",
        "high": f"{start}\nI write each {name} with its place: {', '.join(places)}\nIn order, the smallest first: "
                + f"{', '.join(order)}\n" + f"Together: {s}"}, f"{text} sorted is {s}.", None


def sort_words(rng, held, state):
    def make():
        some, n = {}, rng.randint(2, 5)
        while len(some) < n:
            w = rng.choice(WORDS)
            if not reserved("word", w):
                some.setdefault(w[0], w)
        out = list(some.values())
        rng.shuffle(out)
        return out
    words = draw(held, make, lambda *w: ("sort_words", *sorted(w)))
    order = sorted(words)
    comma, last = rng.choice([(", ", ", "), (", ", " and "), (" ", " ")])
    found = ", ".join(order)
    return phrase(rng, held, "sort_words", list=comma.join(words[:-1]) + last + words[-1]), {
        "low": " ".join(f"{w[0]}" for w in order),
        "medium": f"First letters: {', '.join(w[0] for w in words)}. In order: {', '.join(w[0] for w in order)}.",
        "high": "The first letters:\n" + "".join(f"{w[0]}: {w}\n" for w in words) + "In order:\n"
                + "".join(f"{w[0]}: {w}\n" for w in order) + "That is all."}, f"In order: {found}.", None


def count(rng, held, state):
    w = word(rng, held)
    if rng.random() < 0.25:
        steps, n = running(w, None), len(w)
        question, answer = phrase(rng, held, "length", w=quoted(rng, w)), f'"{w}" has {n} letters.'
        intro = f'I count the letters of "{w}".'
    else:
        c = rng.choice(w) if rng.random() < 0.85 else rng.choice("abcdefghijklmnopqrstuvwxyz")
        steps, n = running(w, c), w.count(c)
        question = phrase(rng, held, "count", w=quoted(rng, w), c=c)
        answer = f'The letter {c} appears {n} time{"s" * (n != 1)} in "{w}".'
        intro = f'I look for {c} in "{w}".'
    return question, {"low": f'"{w}": {" ".join(f"{c}{k}" for c, k in steps)}',
                      "medium": f'{intro} {", ".join(f"{c} {k}" for c, k in steps)}.',
                      "high": f"{intro}\n" + "".join(f"{c}: {k}\n" for c, k in steps) + f"The count is {n}."}, answer, None


def weekday(rng, held, state):
    today, how = state["date"], rng.random()
    if how < 0.2 and (not held or today is None):
        question = phrase(rng, held if today is None else False, "weekday_today")
        if today is None:
            return question, thinking(lambda e: "There is no date."), NO_DATE, None
        day = datetime.date.fromisoformat(today)
        return (question, thinking(lambda e: (f"{day}: " if e == "low" else f"Today is {day}. ") + weekday_steps(day, e)),
                f"Today is {day:%A}.", None)
    if how < 0.55:
        def make():
            return rng.randrange(7), rng.choice([-1, 1]) * rng.randint(1, 60)
        day, n = draw(held, make, lambda *key: ("days", *key))
        start, rest, minus = day, abs(n) % 7, n < 0
        total = start - rest if minus else start + rest
        found, op = total % 7, "-" if minus else "+"
        fold = f"{total}" if 0 <= total <= 6 else f"{total} {'+' if total < 0 else '-'} 7 = {found}"
        think = {"low": f"{abs(n)} mod 7 = {rest}; {start}{op}{rest}={fold}",
                 "medium": f"{abs(n)} mod 7 = {rest}. {DAYS[day]} is day {start}. {start} {op} {rest} = {fold}: "
                           f"{DAYS[found]}.",
                 "high": f"A week has 7 days.\n{abs(n)} = {abs(n) // 7} * 7 + {rest}\n{DAYS[day]} is day {start}.\n"
                         f"{start} {op} {rest} = {fold}\nDay {found} is {DAYS[found]}."}
        kind = "days_before" if minus else "days_after"
        answer = f"{abs(n)} day{'s' * (abs(n) != 1)} {'before' if minus else 'after'} {DAYS[day]} is {DAYS[found]}."
        return phrase(rng, held, kind, n=abs(n), d=DAYS[day]).replace(" 1 days", " 1 day"), think, answer, None
    day, = draw(held, lambda: (date(rng),), lambda d: ("weekday", str(d)))
    return phrase(rng, held, "weekday", d=day), thinking(lambda e: weekday_steps(day, e)), f"{day} is a {day:%A}.", None


def dates(rng, held, state):
    today, how = state["date"], rng.random()
    n = rng.randint(1, 28)
    if how < 0.55:
        back = rng.random() < 0.5
        day, n = draw(held, lambda: (date(rng), -rng.randint(1, 28) if back else rng.randint(1, 28)),
                      lambda d, n: ("date", str(d), n))
        return (phrase(rng, held, "before" if back else "after", n=abs(n), d=day).replace(" 1 days", " 1 day"),
                thinking(lambda e: shift_steps(day, n, e)),
                f"{abs(n)} day{'s' * (abs(n) > 1)} {'before' if back else 'after'} {day} is "
                f"{day + datetime.timedelta(n)}.", None)
    kind = rng.choice(["in_days", "ago", "tomorrow", "yesterday", "today", "today", "today"])
    question = phrase(rng, held and "phrase", kind, n=n).replace(" 1 days", " 1 day")
    if today is None:
        return question, thinking(lambda e: "There is no date."), NO_DATE, None
    day = datetime.date.fromisoformat(today)
    if kind == "today":
        return (question, {"low": "A date.", "medium": f"The system message says {day}.",
                           "high": f"The user asks for the date.\nThe system message says {day}."},
                f"Today is {day}.", None)
    n = {"in_days": n, "ago": -n, "tomorrow": 1, "yesterday": -1}[kind]
    then = day + datetime.timedelta(n)
    answer = {"in_days": f"In {n} day{'s' * (n != 1)} it is {then}.",
              "ago": f"{-n} day{'s' * (n != -1)} ago it was {then}.",
              "tomorrow": f"Tomorrow is {then}.", "yesterday": f"Yesterday was {then}."}[kind]
    return (question, thinking(lambda e: (f"{day}: " if e == "low" else f"Today is {day}. ") + shift_steps(day, n, e)),
            answer, None)


def said(rng, held, kind, what, answer, forms=None, **values):
    """Small talk."""
    return phrase(rng, held and "phrase", kind, forms, **values), said_steps(what), answer, None


def said_steps(what):
    return {"low": what, "medium": f"The user {what}.", "high": f"The user {what}.\nNo steps are needed to answer that."}


def greet(rng, held, state):
    def make():
        who = rng.choice(["", "", "", " tiny", ", tiny", ", model", " friend", ", my friend", " everybody"])
        more = rng.choice(["", "", "", " How are you?", " Nice to see you.", " I am back.", " I have some questions."])
        return rng.choice(GREETINGS), who, rng.choice("!!. ") if not more else rng.choice("!."), more
    parts = draw(held, make, lambda hello, who, _, more: ("greet", hello, who, more))
    text = "".join(parts).strip()
    return text if held or rng.random() < 0.8 else text.lower(), said_steps("greets me"), HELLO, None


def chat(rng, held, state):
    i = rng.randrange(5)
    what = ["asks about me", "asks what I can do", "asks how I am", "is polite", "leaves"][i]
    return said(rng, held, ["who", "can", "how", "thanks", "bye"][i], what, SELF[i])


def refuse(rng, held, state):
    if rng.random() < 0.2 and not held:
        return said(rng, held, "", "wants what I cannot do", SORRY, OTHER)
    forms, things = rng.choice([(WISHES, WISHED), (FACTS, ABOUT)])
    form, thing = draw(bool(held), lambda: (rng.choice(forms), rng.choice(things)), lambda *key: ("refuse", *key))
    return said(rng, held and rng.random() < 0.3, "", "wants what I cannot do", SORRY, [form.format(thing)])


def name(rng, held, state):
    known = state.get("name")
    if state["last"] and (known or rng.random() < 0.3) and (rng.random() < 0.75 or (held and known)):
        think = f"The name is {known}." if known else "There is no name."
        return (phrase(rng, held and "phrase", "my_name"), thinking(lambda e: think),
                f"Your name is {known}." if known else "I do not know your name.", None)
    x = new_name(rng, held)
    state["name"] = x
    return said(rng, False, "name", "tells a name", f"Nice to meet you, {x}.", x=x)


def new_name(rng, held):
    make = (lambda: (rng.choice(NAMES),)) if rng.random() < 0.6 else (lambda: (letters(rng).capitalize(),))
    return draw(bool(held), make, lambda x: ("name", x))[0]


def product(rng, held, state):
    """Without a tool."""
    a, b, kind = number(rng), number(rng) + 1, rng.choice(["mul", "div"])
    return (phrase(rng, held and "phrase", kind, a=a, b=b),
            thinking(lambda e: "I have no calculator." if e != "high" else "The user wants a product or a quotient.\nI "
                     "have no calculator."), NO_TOOL, None)


KINDS = {add: 17, sub: 19, compare: 8, parity: 3, reverse: 9, sort: 8, sort_words: 3, count: 9, weekday: 8, dates: 9,
         greet: 2, chat: 3, refuse: 3, name: 4, product: 1}
LAST = KINDS | {reverse: 11, sort: 13}  # of the last question in training: what takes longest to learn comes more often


# ---- the calculator

DESCRIPTIONS = ["Evaluates an arithmetic expression.", "Calculates an expression.", "A calculator.",
                "Computes the value of an arithmetic expression."]
FIELDS = ["The expression, such as 12*34", "An arithmetic expression", "What to calculate, for example 2+3*4"]


def calculator(rng=None):
    pick = rng.choice if rng else lambda some: some[0]
    return {"type": "function", "function": {
        "name": "calculator", "description": pick(DESCRIPTIONS), "parameters": {
            "type": "object", "properties": {"expression": {"type": "string", "description": pick(FIELDS)}},
            "required": ["expression"]}}}


def call(rng, held, state):
    """Question, thinking, arguments, what the tool says, answer, that."""
    op, kind = rng.choice([("+", "add"), ("-", "sub"), ("*", "mul"), ("*", "mul"), ("/", "div")])
    that = state.get("that")
    a, b = draw(held, lambda: numbers(rng), lambda *key: ("call", op, *key))
    question = kind
    if op in "+-" and that is not None and rng.random() < 0.5:
        (b,), question = draw(held, lambda: (number(rng),), lambda b: ("call", op, that, b)), kind + "_that"
        a = that
    if op == "/":
        b += not b
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else 0}[op]
    if op == "/":
        value = a // b if a % b == 0 else round(value, rng.randint(1, 6))
    if not held and rng.random() < 0.3:  # it is the tool that knows
        value = rng.randint(-10 ** rng.randint(1, 6), 10 ** rng.randint(1, 12))
    if isinstance(value, float):
        value = f"{value:.6f}".rstrip("0").rstrip(".")
    think = thinking(lambda e: "Calculator." if e == "low" else "I use the calculator." if e == "medium" else
                     f"The user wants {a} {op} {b}.\nI use the calculator.")
    output = rng.choice(["{}", "{}", '{{"result": {}}}', '{{"result":{}}}']).format(value)
    ok = isinstance(value, int) and 0 <= value < 10 ** 6
    return (phrase(rng, held, question, a=a, b=b), think, '{"expression":"%s%s%s"}' % (a, op, b), output,
            f"{a} {op} {b} = {value}", value if ok else None)


INSTRUCTIONS = ["Be brief.", "You are a helpful assistant.", "Answer politely.", "Be kind.", "Be precise.",
                "You are tiny, a small model.", "Think before you answer.", "Help the user.", "Answer in English.",
                "You help people with numbers and words."]
CALCULATES = (add, sub, product)


def conversation(rng, kind=None, held=False, effort=None, turns=None, stage=None):
    """One to four turns, rarely six, as {messages, tools, reasoning_effort, date} up to the last question, and what should follow:
    a list of (channel, text), in which channel "call" holds arguments and "tool" what the tool says. kind: of the last
    question, a function above or `call`; stage "result": up to the tool's result."""
    kind = kind or rng.choices(list(LAST), LAST.values())[0]
    tools = kind is call or (rng.random() < 0.08 and not held)
    if tools and kind in CALCULATES:
        kind = call
    effort = effort or rng.choice(EFFORTS)
    today = None if rng.random() < 0.03 else str(date(rng) if rng.random() < 0.5 else
                                                 datetime.date(2025, 1, 1) + datetime.timedelta(rng.randrange(1800)))
    state, messages = {"date": today}, []
    if rng.random() < 0.12:
        messages.append({"role": "system", "content": rng.choice(INSTRUCTIONS)})
    turns = turns or rng.choices([1, 2, 3, 4, 5, 6], [60, 16, 10, 10, 2, 2])[0]
    for i in range(turns):
        last = i == turns - 1
        state["last"] = last
        this = kind if last else rng.choices(list(KINDS), KINDS.values())[0]
        if this in CALCULATES and tools:
            this = call
        if not last and kind is name and rng.random() < 0.5:
            this = name
        if not last and rng.random() < 0.25:
            this = rng.choice([call] if tools else [add, sub])
        keep = state.get("that")
        before = state.get("name")
        if this is call:
            question, think, arguments, output, answer, that = call(rng, held and last, state)
        else:
            question, think, answer, that = this(rng, held and last, state)
        if "that" in state:
            del state["that"]
        if that is not None and 0 <= that < 10 ** 6:
            state["that"] = that
        messages.append({"role": "user", "content": question})
        called = {"role": "assistant", "content": None, "reasoning_content": think[effort]}
        if this is call:
            called["tool_calls"] = [{"id": f"call_{i}", "type": "function",
                                     "function": {"name": "calculator", "arguments": arguments}}]
            result = {"role": "tool", "tool_call_id": f"call_{i}", "content": output}
        if not last:
            messages += [called, result] if this is call else []
            messages.append({"role": "assistant", "content": answer})
    follows = [("analysis", think[effort]), ("final", answer)]
    if this is call and stage == "result":
        messages += [called, result]
        follows = [("final", answer)]
    elif this is call:
        follows[1:] = [("call", arguments), ("tool", output), ("final", answer)]
    c = {"messages": messages, "reasoning_effort": effort, "date": today or "none"}
    if tools:
        c["tools"] = [calculator(rng)]
    return c, follows


# ---- harmony: a conversation as text and control tokens, exactly as infer renders it (chat.c)

def tool_text(tool):
    f = tool["function"]
    fields = "".join(f"// {d['description']}\n{n}: {d['type']},\n" for n, d in f["parameters"]["properties"].items())
    return (f"# Tools\n\n## functions\n\nnamespace functions {{\n\n// {f['description']}\ntype {f['name']} = (_: {{\n"
            f"{fields}}}) => any;\n\n}} // namespace functions")


def message(header, channel, text, end="end"):
    middle = [("channel",), channel] if channel else []
    return [("start",), header, *middle, ("message",), text, (end,)]


def prompt(c):
    """A list of text and of control tokens, ("start",) for <|start|>, that ends where the model goes on."""
    tools, messages = c.get("tools"), c["messages"]
    today = "" if c["date"] == "none" else f"Current date: {c['date']}\n"
    calls = "\nCalls to these tools must go to the commentary channel: 'functions'." if tools else ""
    parts = message("system", None, "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: "
                    f"2024-06\n{today}\nReasoning: {c['reasoning_effort']}\n\n# Valid channels: analysis, commentary, "
                    f"final. Channel must be included for every message.{calls}")
    developer = []
    if messages[0]["role"] == "system":
        developer.append(f"# Instructions\n\n{messages[0]['content']}")
    if tools:
        developer.append(tool_text(tools[0]))
    if developer:
        parts += message("developer", None, "\n\n".join(developer))
    ended = max([i for i, m in enumerate(messages) if m["role"] == "assistant" and not m.get("tool_calls")], default=-1)
    for i, m in enumerate(messages):
        if m["role"] == "user":
            parts += message("user", None, m["content"])
        elif m["role"] == "tool":
            parts += message("functions.calculator to=assistant", "commentary", m["content"])
        elif m["role"] == "assistant" and m.get("tool_calls"):
            if i > ended:
                parts += message("assistant", "analysis", m["reasoning_content"])
            parts += call_parts(m["tool_calls"][0]["function"]["arguments"])
        elif m["role"] == "assistant":
            parts += message("assistant", "final", m["content"])
    return parts + [("start",), "assistant"]


def call_parts(arguments):
    return [("start",), "assistant", ("channel",), "commentary to=functions.calculator ", ("constrain",), "json",
            ("message",), arguments, ("call",)]


def completion(follows):
    """[(part, is it sampled)] behind a prompt: <|start|>assistant stands there already, and behind a tool's message."""
    out, given = [], 2
    for channel, text in follows:
        if channel == "tool":
            parts = message("functions.calculator to=assistant", "commentary", text) + [("start",), "assistant"]
            out += [(p, False) for p in parts]
            given = 2
            continue
        parts = call_parts(text) if channel == "call" else message(
            "assistant", channel, text, "return" if channel == "final" else "end")
        out += [(p, True) for p in parts[given:]]
        given = 0
    return out


# ---- held-out questions

HELD = {add: 85, sub: 85, compare: 50, parity: 20, reverse: 50, sort: 45, sort_words: 15, count: 45, weekday: 30,
        dates: 30, greet: 5, chat: 8, refuse: 8, name: 8, product: 4, "call": 6, "result": 6}


def questions(seed=2026):
    """500, each a conversation with its kind and answer; of a call the answer is its arguments."""
    rng, out, seen = random.Random(seed), [], set()
    for kind, n in HELD.items():
        label, made = kind if isinstance(kind, str) else kind.__name__, 0
        while made < n:
            function = call if isinstance(kind, str) else kind
            c, follows = conversation(rng, function, held=True, stage=kind, effort=EFFORTS[made % 3],
                                      turns=[1, 1, 1, 1, 1, 2, 1, 3, 1, 4][made % 10])
            key = json.dumps([c["messages"][-1]["content"], c["date"] if label in ("dates", "weekday") else ""])
            if key in seen:
                continue
            seen.add(key)
            out.append({"kind": label, "answer": follows[1][1] if len(follows) > 1 else follows[0][1], **c})
            made += 1
    return out


if __name__ == "__main__":
    rng = random.Random()
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
        c, follows = conversation(rng)
        parts = prompt(c) + [p for p, _ in completion(follows)]
        print("".join(p if isinstance(p, str) else f"<|{p[0]}|>" for p in parts), end="\n\n")
