"""A short tool loop with one terminal reward: look an animal up, look its friend up, say the friend's colour.

    ask fox | look fox . | page fox ~ ~ ~ friend owl | look owl . | page owl ~ ~ ~ colour red | say red .
    prompt    turn 1       observation                 turn 2       observation                 turn 3

The pages are random in each episode, so the observation decides what is right. The page of an animal that was not
wanted says `nothing`, and what no page said is not rewarded, so an observation can also tell that all is lost. The
starting policy, taught from a player who errs, solves about a fifth. Pages are several times as long as turns.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.sao.tasks import Episode, Progress
from simulation.servable import replaced_directory, write_servable

ANIMALS = ("fox", "owl", "hare", "wolf", "crow", "toad", "lynx", "mole")
COLOURS = ("red", "blue", "green", "white", "black", "gold", "grey", "pink")
FILLERS = tuple(f"~{number}" for number in range(8))
END, PAD, NOTHING = ".", "<pad>", "nothing"
WORDS = (PAD, END, NOTHING, "ask", "look", "say", "page", "friend", "colour", *ANIMALS, *COLOURS, *FILLERS)
IDS = {word: index for index, word in enumerate(WORDS)}
TRANSCRIPT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@dataclass(frozen=True, slots=True)
class LookupModel:
    """Shape and teaching of the model that starts on the task."""

    hidden_size: int = 64
    intermediate_size: int = 192
    num_layers: int = 2
    num_heads: int = 4
    num_clean_steps: int = 150
    """First steps, on a player who never errs: what to copy from where is hard to learn from one who does."""
    num_steps: int = 210
    num_sequences_per_step: int = 64
    learning_rate: float = 3e-3
    right_share: float = 0.6
    """How often the player of the last steps takes the right word; otherwise any word of the kind."""
    seed: int = 0


class World:
    """One episode's facts, and the pages that tell them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.asked = rng.choice(ANIMALS)
        self.friends = {animal: rng.choice([other for other in ANIMALS if other != animal]) for animal in ANIMALS}
        self.colours = {animal: rng.choice(COLOURS) for animal in ANIMALS}

    def page(self, animal: str, fact: str) -> list[str]:
        """What looking `animal` up shows: filler, then its `friend` or its `colour`, or `nothing`."""
        wanted = self.asked if fact == "friend" else self.friends[self.asked]
        value = self.friends[animal] if fact == "friend" else self.colours[animal]
        found = value if animal == wanted else NOTHING
        return ["page", animal, *self.rng.choices(FILLERS, k=self.rng.randint(8, 24)), fact, found]

    @property
    def answer(self) -> str:
        return self.colours[self.friends[self.asked]]


class LookupEpisode:
    """Two lookups and an answer; a turn that is not one of these ends the episode unrewarded."""

    max_tokens = 4

    def __init__(self, world: World) -> None:
        self.prompt_ids = [IDS["ask"], IDS[world.asked]]
        self._world = world
        self._num_turns = 0
        self._found = NOTHING
        self.succeeded = False

    def observe(self, generated_ids: Sequence[int], text: str) -> list[int] | None:
        words = [WORDS[token_id] for token_id in generated_ids]
        self._num_turns += 1
        if self._num_turns < 3 and len(words) == 3 and words[0] == "look" and words[1] in ANIMALS and words[2] == END:
            page = self._world.page(words[1], "friend" if self._num_turns == 1 else "colour")
            self._found = page[-1]
            return [IDS[word] for word in page]
        told = self._found == self._world.answer
        self.succeeded = self._num_turns == 3 and told and words == ["say", self._world.answer, END]
        return None

    @property
    def reward(self) -> float:
        return float(self.succeeded)


class LookupTask:
    """Episodes over random worlds."""

    max_model_len = 128

    def __init__(self, data_dir: Path, progress: Progress, config: LookupModel | None = None) -> None:
        self.directory = build_lookup(data_dir / "models" / "lookup", config or LookupModel(), progress)

    def episodes(self, rng: random.Random, num_prompts: int, group_size: int) -> list[Episode]:
        chosen: list[Episode] = []
        for _ in range(num_prompts):
            seed = rng.random()
            chosen += [LookupEpisode(World(random.Random(seed))) for _ in range(group_size)]
        return chosen


def played(rng: random.Random, right_share: float) -> tuple[list[int], list[bool]]:
    """One transcript of a player who errs: token ids, and which of them the player said."""
    world = World(rng)

    def choose(right: str, kind: Sequence[str]) -> str:
        return right if rng.random() < right_share else rng.choice(kind)

    first = choose(world.asked, ANIMALS)
    page = world.page(first, "friend")
    second = choose(page[-1], ANIMALS) if page[-1] != NOTHING else rng.choice(ANIMALS)
    last_page = world.page(second, "colour")
    said = choose(last_page[-1], COLOURS) if last_page[-1] != NOTHING else rng.choice(COLOURS)
    parts = (
        (["ask", world.asked], False),
        (["look", first, END], True),
        (page, False),
        (["look", second, END], True),
        (last_page, False),
        (["say", said, END], True),
    )
    words = [word for part, _ in parts for word in part]
    mask = [is_player for part, is_player in parts for _ in part]
    return [IDS[word] for word in words], mask


def build_lookup(destination: Path, config: LookupModel, progress: Progress) -> Path:
    """Teach a small Llama the transcripts of `played` and write it to `destination`, unless it is there already."""
    from transformers import LlamaConfig, LlamaForCausalLM

    key = json.dumps(asdict(config), sort_keys=True)
    stamp = destination / "lookup.json"
    if stamp.is_file() and stamp.read_text() == key:
        return destination
    torch.manual_seed(config.seed)
    rng = random.Random(config.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_heads,
            max_position_embeddings=LookupTask.max_model_len,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=IDS[END],
            pad_token_id=IDS[PAD],
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    num_erring_steps = config.num_steps - config.num_clean_steps
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 30, max(0.1, (config.num_steps - step) / num_erring_steps), 1.0)
    )
    for step in range(config.num_steps):
        right_share = 1.0 if step < config.num_clean_steps else config.right_share
        rows = [played(rng, right_share) for _ in range(config.num_sequences_per_step)]
        longest = max(len(ids) for ids, _ in rows)
        ids_BT = torch.full((len(rows), longest), IDS[PAD])
        targets_BT = torch.full((len(rows), longest), -100)
        for row, (ids, mask) in enumerate(rows):
            ids_BT[row, : len(ids)] = torch.tensor(ids)
            targets_BT[row, : len(ids)] = torch.where(torch.tensor(mask), torch.tensor(ids), -100)
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), targets_BT[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0 or step + 1 == config.num_steps:
            progress(f"lookup model, loss {float(loss.detach()):.2f}", step + 1, config.num_steps)
    with replaced_directory(destination) as directory:
        write_servable(model.eval(), build_lookup_tokenizer(), directory)
        (directory / stamp.name).write_text(key)
    return destination


def build_lookup_tokenizer() -> Any:
    """One token for each word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, model_max_length=LookupTask.max_model_len
    )
    fast.chat_template = TRANSCRIPT_TEMPLATE
    return fast
