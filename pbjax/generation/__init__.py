"""Text generation: prompts in, tokens out, one compiled step for a whole run."""

from pbjax.generation.api import generate as generate
from pbjax.generation.api import stream as stream
from pbjax.generation.results import Completion as Completion
from pbjax.generation.results import Token as Token
