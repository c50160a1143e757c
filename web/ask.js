// Asks for the API key once the API wants one, and forgets it when that is wished.

import { call } from "./api.js";
import { find, say, set } from "./dom.js";
import { forgetKey, keepKey, onRefused, storedKey } from "./key.js";

const LOOKS_LIKE_A_KEY = /^ak_[0-9a-f]+_[0-9a-f]+$/;

// What follows a change of the key is a page that begins anew: what it showed was somebody else's.
export function openKeyForm() {
  const [panel, said, form, input, problem, forget] = [
    "key-panel", "key-said", "key-form", "key", "key-problem", "forget-key",
  ].map(find);
  const button = form.querySelector("button");
  set(forget, "hidden", !storedKey());
  forget.addEventListener("click", () => {
    forgetKey();
    location.reload();
  });

  onRefused((words) => {
    say(said, storedKey()
      ? `The API refuses the key of this tab: ${words}.`
      : "Whoever runs this API can give you one; it begins with ak_.");
    set(panel, "hidden", false);
  });

  function refuse(words) {
    say(problem, words);
    set(input, "aria-invalid", words ? "true" : null);
  }

  input.addEventListener("input", () => refuse(""));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const key = input.value.trim();
    button.disabled = true;
    try {
      if (!LOOKS_LIKE_A_KEY.test(key)) throw new Error("This is no key: a key begins with ak_.");
      await call("GET", "/stats", { apiKey: key });
      keepKey(key);
      location.reload();
    } catch (refused) {
      refuse(refused.status === 401 ? `It was refused: ${refused.message}.` : refused.message);
      input.focus();
    } finally {
      button.disabled = false;
    }
  });
}
