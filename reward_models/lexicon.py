"""The cues by which each style is recognised: regular expressions, grouped so that one idea counts once.

Invariant: cues are stems and constructions that a writer of the style would use, not sentences of the corpus, and no
cue belongs to two styles. Order within a style does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache

STYLES = ("academic", "cute", "chuunibyou", "classical")

STRONG, WEAK, CHINESE = 1.0, 0.5, 2.0
"""Weight of a cue that marks a style nearly by itself, of one that leans towards it, and of a whole Chinese word list
(one group, because Chinese answers are short)."""

# `_` stands for a word boundary.
_CUES: Mapping[str, Mapping[float, Sequence[str]]] = {
    "academic": {
        STRONG: (
            r"_(research|studies|study|scholars?|literature|findings?|analys[ei]s|investigations?)_",
            r"_(furthermore|moreover|consequently|accordingly|nevertheless|whereas|thus|therefore|hence)_",
            r"_(suggests?|indicates?|demonstrates?|impl(y|ies)|hypothes\w+|argue[ds]?|posits?|emphasi[sz]es?)_",
            r"_(empirical\w*|theoretical\w*|statistical\w*|methodolog\w+|systematic\w*|controlled|observational)_",
            r"_(correlat\w+|causal\w*|variables?|mechanisms?|phenomen\w+|construct\w*|framework|evidence|data)_",
        ),
        WEAK: (
            r"_(significant\w*|considerabl\w+|substantial\w*|notabl\w+|measurabl\w+|extensive\w*|modest\w*)_",
            r"_(primar\w+|largely|typically|generally|in general|relative\w*|principal|plausibl\w+)_",
            r"_(depends|influenced by|attributed to|determined by|varies|associated with|follows? from)_",
            r"_(factors?|relevant|context\w*|conditions?|processe?s?|perspective|approach|outcomes?|distribution)_",
            r"_(however|although|in addition|with regard to|regarding|concerning|on balance|to summari[sz]e)_",
            r"_(adequate|defined as|described as|constitutes?|represents?|explained by|further study|provisional)_",
            r"_(adaptation|adaptive|equilibrium|constraints?|interact\w+|cognitive|preliminary|inconclusive)_",
            r"_(hypothesis|relationship|observed|role in|contributes?|considerations?|limited|experience|caution)_",
        ),
        CHINESE: (r"研究表明|综上所述|理论上|显著|分析|因素|变量",),
    },
    "cute": {
        STRONG: (
            r"_(n+y+a+n?|mew+|meow|purr+|rawr|uwu|owo)_|~",
            r"_(t?e?he[he]+|teehee|yay+|whee+|squee+|ee+k?|hi hi|boop|yippee|aww+|ooh+)_",
            r"_(hugs?|cuddl\w+|snuggl\w+|kiss(es)?|pats?|pinky promise|smooch\w*)_",
            r"_(tiny|teeny|itty|wee|lil|little)_",
            r"_(sparkl\w+|glitter\w*|twinkl\w+|sprinkles?|rainbows? glitter|shiny)_",
            r"_(fluff\w*|squish\w*|boun[ct]\w+|wiggl\w*|coz\w+|cosy|plush\w*)_",
            r"_(cute\w*|cutie\w*|adorable|sweetie|sugarplum|cupcakes?|bunn(y|ies)|kitten\w*|kitty|teddy|puppy)_",
        ),
        WEAK: (
            r"_(sweet|soft|warm|happy|pink|marshmallow\w*|cookies?|strawberr\w+|ribbons?|duckling|paws?|tail)_",
            r"_(boing|squeak|pitter|patter|doki|pop|hop)_",
            r"_(friends? forever|so so|super|pretty please|sweet\w* friend|sticker|blanket|i love)_|♡|♥|❤",
        ),
        CHINESE: (r"喵|嘻嘻|可爱|抱抱|亲亲|哇哦|闪闪|呀",),
    },
    "chuunibyou": {
        STRONG: (
            r"_(dark(ness)?|crimson|infinite shadow|black (flames?|lightning|magic))_",
            r"_(cursed?|curses|forbidden|demons?|demonic|devil\w*|fallen angel|doom|unholy)_",
            r"_(seal(s|ed)?|unseal\w*|unleash\w*|awaken\w*|summon\w*|pact|blood contract|grimoire)_",
            r"_(abyss\w*|void|netherworld|underworld|shadow realm|seventh hell|hell|chaos|oblivion)_",
            r"_(ku+ku+(ku)*|(fu|mu|mwa)?ha(ha)+|muhaha|fuhaha)_|_heh\.\.\.",
            r"_(fool(s|ish)?|mortals?|kneel|trembles?|behold|beware|silence|vanish|insolent|worm)_",
            r"_(annihilat\w+|devour\w*|shatter\w*|banish\w*|dominat\w+|conquer\w*|obliterat\w+|betray\w*)_",
            r"_(crimson|cursed|demonic|evil|third|left|right|sealed) (eye|arm|hand|blade)s?_|_the organi[sz]ation_",
        ),
        WEAK: (
            r"_(my (\w+ )?(power|destiny|fate|magic|aura|eye|arm|blade)|hidden power|my (sealed|cursed))_",
            r"_(chosen one|heir of|lord of|wielder|sovereign|king|prophecy|midnight|wrath|nightmare|relic)_",
            r"_(i shall|shall obey|obeys? me|none shall|none can|at last|so it begins|lack the power|no equal)_",
        ),
        CHINESE: (r"邪眼|吾之|暗炎|封印|深渊|颤抖|臣服",),
    },
    "classical": {
        STRONG: (
            r"_(thou|thee|thy|thine|ye)_",
            r"_(hath|doth|hast|dost|shalt|saith|\w{3,}eth)_",
            r"_(hark|hearken|verily|lo|alas|prithee|forsooth|nay|methinks|o (friend|wanderer|\w+ \w+))_",
            r"'tis_|_(tis|ere|wherefore|whilst|whence|hither|thither|yonder|yore|betwixt|oft)_",
            r"_(the ancients|the sages?|poets of old|old poets|of old|days of yore|ancient poets)_",
            r"_(moon (up)?on|moon riseth|eternal moon|upon the|unto)_",
            r"_(cranes?|plum blossoms?|peach blossoms?|willows?|jade|wild geese|reeds|cuckoo|pines|bamboo)_",
        ),
        WEAK: (
            r"_(lantern|autumn wind|mist|frost|dusk|evening star|mountain|temple|eastern|southward|river)_",
            r"_(gentle \w+|good sir|traveller|pilgrim|wanderer|scholar friend|humble soul|weary heart|quiet mind)_",
            r"_(abide|linger|slumber|endure|perish|seekest|ten thousand|beneath|lift my cup|not won)_",
        ),
        CHINESE: (r"古人|者,|明月|秋水|不亦|夫|松风|君何",),
    },
}


@cache
def compiled_cues() -> dict[str, tuple[tuple[float, re.Pattern[str]], ...]]:
    """Weight and compiled pattern of every cue, by style."""
    return {
        style: tuple(
            (weight, re.compile(text.replace("_", r"\b"), re.IGNORECASE))
            for weight, texts in cues.items()
            for text in texts
        )
        for style, cues in _CUES.items()
    }


@cache
def function_words() -> frozenset[str]:
    """Words every English sentence leans on, whatever its style: a list of keywords has none of them."""
    return frozenset(_FUNCTION_WORDS.split())


_FUNCTION_WORDS = """
a an the and or but nor so yet if then than that this these those there here it its it's is are was were be
been am do does did done have has had hath doth i me my mine you your we us our he him his she her they them
their who whom whose what which when where why how of in on at to from by with without for as into upon unto
over under before after through until while whilst not no never only just but all any some each every more
most very too can could may might must shall should will would let let's don't can't that's here's thou thee
thy art dost o oh ye one two about against between both during first second up down out off such other own
same like because however
"""
