"""Client libraries that ask for answers in a schema: schema_clients.py URL. test_json.py runs it, with packages that
.ci/run installs. Each answer must be read by the library as the type that was asked for."""
import asyncio
import sys
from typing import Literal, Optional

from pydantic import BaseModel, ConfigDict, Field

URL = sys.argv[1] + "/v1"


class Sum(BaseModel):
    """A sum of two numbers."""
    model_config = ConfigDict(extra="forbid")
    first: int = Field(ge=0, le=999)
    second: int = Field(ge=0, le=999)
    sure: bool
    kind: Literal["sum", "difference"]
    note: Optional[str] = Field(max_length=12)


QUESTION = "What is 2 + 31?"
MESSAGES = [{"role": "user", "content": QUESTION}]


def check(name, value, kind=Sum):
    assert isinstance(value, kind), f"{name}: {value!r}"
    print(f"ok {name}: {value!r}", flush=True)


def openai_parse():
    import openai
    client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
    how = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 500}
    check("openai parse", client.chat.completions.parse(response_format=Sum, **how).choices[0].message.parsed)
    tool = openai.pydantic_function_tool(Sum, name="add")
    answer = client.chat.completions.parse(tools=[tool], tool_choice="required", **how).choices[0].message
    check("openai strict tools", answer.tool_calls[0].function.parsed_arguments)
    with client.chat.completions.stream(response_format=Sum, **how) as stream:
        check("openai stream", stream.get_final_completion().choices[0].message.parsed)


def instructor_modes():
    import instructor
    import openai
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key="none", max_retries=0), mode=mode)
        check(f"instructor {mode}", client.chat.completions.create(model="tiny", messages=MESSAGES, response_model=Sum,
                                                                    max_retries=0, max_tokens=500))


def langchain():
    from langchain_openai import ChatOpenAI
    model = ChatOpenAI(model="tiny", base_url=URL, api_key="none", max_tokens=500, max_retries=0)
    for method in ("json_schema", "function_calling"):
        check(f"langchain {method}", model.with_structured_output(Sum, method=method).invoke(QUESTION))


def pydantic_ai():
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=URL, api_key="none"))
    result = Agent(model, output_type=NativeOutput(Sum)).run_sync(QUESTION, model_settings={"max_tokens": 500})
    check("pydantic-ai", result.output)


def openai_agents():
    import agents
    import openai
    agents.set_tracing_disabled(True)

    def model():  # an event loop each
        return agents.OpenAIChatCompletionsModel("tiny", openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0))
    settings = agents.ModelSettings(max_tokens=500)
    agent = agents.Agent(name="a", model=model(), output_type=Sum, model_settings=settings)
    check("openai-agents output_type", asyncio.run(agents.Runner.run(agent, QUESTION)).final_output)
    called = []

    @agents.function_tool(strict_mode=True)
    def add(first: int, kind: Literal["sum", "difference"]) -> str:
        called.append((first, kind))
        return "33"
    settings = agents.ModelSettings(max_tokens=500, tool_choice="required")
    agent = agents.Agent(name="b", model=model(), tools=[add], model_settings=settings, tool_use_behavior="stop_on_first_tool")
    asyncio.run(agents.Runner.run(agent, QUESTION))
    check("openai-agents strict tools", called[0], tuple)


for client in (openai_parse, instructor_modes, langchain, pydantic_ai, openai_agents):
    client()
