// Runs to begin with. They use only what every installation has, the built-in tools and a model; and
// the last the agent team, for which the worker needs requirements-agents.txt.

export const EXAMPLES = [
  {
    title: "Fetch, fail once, retry, summarize",
    run: {
      goal: "Research and summarize a topic",
      steps: [
        { name: "tool_call.fetch_data", input: { tool: "fetch_data" } },
        {
          name: "tool_call.flaky_check",
          input: { tool: "flaky", args: { failures: 1 } },
          dependsOn: ["tool_call.fetch_data"],
        },
        {
          name: "llm_call.summarize",
          input: { prompt: "Summarize in two sentences: {{ tool_call.fetch_data.output }}" },
          dependsOn: ["tool_call.fetch_data", "tool_call.flaky_check"],
        },
      ],
    },
  },
  {
    title: "Draft, ask a person, finish",
    run: {
      goal: "Write an announcement that somebody has approved",
      steps: [
        {
          name: "llm_call.draft",
          input: { prompt: "Announce in one sentence that the queue now survives crashes." },
        },
        {
          name: "approval.review",
          input: { question: "May this go out?", draft: "{{ llm_call.draft.output }}" },
          dependsOn: ["llm_call.draft"],
        },
        {
          name: "llm_call.final",
          input: {
            prompt:
              "Improve this sentence: {{ llm_call.draft.output }}\nTake this advice: {{ approval.review.output.feedback }}",
          },
          dependsOn: ["llm_call.draft", "approval.review"],
        },
      ],
    },
  },
  {
    title: "Fan out and in – tools only",
    run: {
      goal: "Work on three regions at once and bring them together",
      steps: [
        { name: "tool_call.fetch_data", input: { tool: "fetch_data" } },
        ...["north", "south", "west"].map((region, index) => ({
          name: `tool_call.${region}`,
          input: { tool: "sleep", args: { seconds: 2 + index } },
          dependsOn: ["tool_call.fetch_data"],
        })),
        {
          name: "tool_call.flaky_merge",
          input: { tool: "flaky", args: { failures: 2 } },
          dependsOn: ["tool_call.north", "tool_call.south", "tool_call.west"],
        },
        {
          name: "tool_call.report",
          input: { tool: "echo", args: { text: "All three are in." } },
          dependsOn: ["tool_call.flaky_merge"],
        },
      ],
    },
  },
  {
    title: "A team writes code, a person reads it",
    run: {
      goal: "Have a function written, and have it explained",
      steps: [
        {
          name: "agent_call.team",
          input: {
            task: "Write a Python function that says whether a text is a palindrome.",
            require_approval: true,
          },
        },
        {
          name: "llm_call.explain",
          input: { prompt: "Explain in two sentences:\n{{ agent_call.team.output.code }}" },
          dependsOn: ["agent_call.team"],
        },
      ],
    },
  },
];

// JSON as a person would write it: what fits into a line stays in one.
export function asText(value, key = "", indent = "", width = 46) {
  const flat = JSON.stringify(value, null, 1).replace(/\n\s*/g, " ");
  if (typeof value !== "object" || value === null || (indent + key + flat).length <= width) {
    return `${key}${flat}`;
  }
  const isList = Array.isArray(value);
  const [opening, closing] = isList ? "[]" : "{}";
  const deeper = `${indent}  `;
  const lines = Object.entries(value).map(
    ([name, item]) => deeper + asText(item, isList ? "" : `${JSON.stringify(name)}: `, deeper),
  );
  return `${key}${opening}\n${lines.join(",\n")}\n${indent}${closing}`;
}
