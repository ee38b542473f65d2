"""Text generation: prompts in, tokens out, one compiled step for a whole run."""

from pbjax.inference.generation.api import generate as generate
from pbjax.inference.generation.api import stream as stream
from pbjax.inference.generation.results import Completion as Completion
from pbjax.inference.generation.results import Token as Token
