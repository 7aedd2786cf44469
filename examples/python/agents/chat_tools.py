"""A `ChatAgent` with the stock OpenAI client and a tool loop of its own: a calculator, until the model answers.

molt rl --train.agent_path examples/python/agents/chat_tools.py --data.label_key label --data.apply_chat_template ...
"""

import ast
import json
import operator

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from molt.agents import ChatAgent, ChatAgentRunner, ChatContext, Result

TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "The value of an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
MOST_CALLS = 4
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> str:
    """`+ - * /` and brackets; anything else is told to the model."""

    def value(node: ast.AST) -> float:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        raise ValueError("only numbers, + - * / and brackets")

    try:
        return f"{value(ast.parse(expression, mode='eval').body):g}"
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as error:
        return f"error: {error}"


class Calculator(ChatAgent):
    async def run(self, ctx: ChatContext) -> Result:
        messages, calls = list(ctx.prompt), 0
        http = DefaultAsyncHttpxClient(verify=False)  # plain HTTP: else each client loads certificates, for 35 ms
        async with AsyncOpenAI(base_url=ctx.openai_url, api_key=ctx.api_key, http_client=http) as client:
            while calls <= MOST_CALLS:
                reply = await client.chat.completions.create(model=ctx.model, messages=messages, tools=[TOOL])
                said = reply.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                if not said.tool_calls:
                    words = (said.content or "").rstrip(" .").split()
                    return Result(reward=float(words[-1:] == [str(ctx.label)]), info={"calls": calls})
                calls += len(said.tool_calls)
                messages += [self.result(call) for call in said.tool_calls]
        return Result(reward=0.0, truncated=True, info={"calls": calls})

    def result(self, call) -> dict[str, str]:
        given = json.loads(call.function.arguments)
        expression = given.get("expression", "") if isinstance(given, dict) else ""
        return {"role": "tool", "tool_call_id": call.id, "content": calculate(str(expression))}


class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(Calculator)
