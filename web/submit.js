// The form: choose an example, change it, submit it, read what the API objects to.

import { Refused, call, newKey } from "./api.js";
import { find, make, say, set } from "./dom.js";
import { EXAMPLES, asText } from "./examples.js";

const DRAFT = "run being written"; // in the tab's own store: a reload loses nobody's work

// `onSubmitted(run)` gets the API's answer.
export function openForm(onSubmitted) {
  const [form, example, text, problem] = ["submit", "example", "dag", "refused"].map(find);
  const button = form.querySelector("button");
  let sent = { text: null, key: null };

  example.append(...EXAMPLES.map(({ title }, index) => make("option", { value: index }, title)));
  const draft = sessionStorage.getItem(DRAFT);
  text.value = draft ?? asText(EXAMPLES[0].run);
  example.addEventListener("change", () => {
    text.value = asText(EXAMPLES[Number(example.value)].run);
    sessionStorage.setItem(DRAFT, text.value);
    refuse([]);
  });
  text.addEventListener("input", () => {
    sessionStorage.setItem(DRAFT, text.value);
    refuse([]);
  });

  function refuse(sentences) {
    problem.replaceChildren(...sentences.map((sentence) => make("p", {}, sentence)));
    set(text, "aria-invalid", sentences.length ? "true" : null);
  }

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (button.disabled) return;
    // Whoever presses again after a lost answer means the same run, and the same key finds it.
    if (sent.text !== text.value) sent = { text: text.value, key: newKey() };
    refuse([]);
    button.disabled = true;
    say(button, "Submitting…");
    try {
      const run = await call("POST", "/runs", { body: checked(text), key: sent.key });
      sent = { text: null, key: null };
      onSubmitted(run);
    } catch (refused) {
      refuse(objections(refused, text.value));
      text.focus();
    } finally {
      button.disabled = false;
      say(button, "Submit run");
    }
  });
}

// The text as it stands, if it is JSON at all: what it means is for the API to say.
function checked(text) {
  try {
    JSON.parse(text.value);
    return text.value;
  } catch (error) {
    const place = /position (\d+)/.exec(error.message);
    if (place) text.setSelectionRange(Number(place[1]), Number(place[1]));
    throw new Refused(422, `This is not JSON yet: ${error.message}.`);
  }
}

// The API's words, with the name of the step beside its number.
function objections(refused, text) {
  if (!refused.detail.length) {
    const again = refused.isAway ? " Press again: it is the same run, not a second one." : "";
    return [`${refused.message}${again}`];
  }
  return refused.detail.map(({ field, message }) => {
    const number = /^steps\.(\d+)/.exec(field);
    const name = number && JSON.parse(text).steps?.[number[1]]?.name;
    return `${field}${typeof name === "string" ? ` (${name})` : ""}: ${message}`;
  });
}
