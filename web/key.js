// The API key, where one is needed: in this tab's own store, sent as a header, never in an address.

const STORE = "API key";

export function storedKey() {
  return sessionStorage.getItem(STORE);
}

export function keepKey(key) {
  sessionStorage.setItem(STORE, key);
}

export function forgetKey() {
  sessionStorage.removeItem(STORE);
}

// The API has refused what was stored, or that nothing was; `words` are its own.
export function tellRefused(words) {
  dispatchEvent(new CustomEvent("keyrefused", { detail: words }));
}

export function onRefused(listener) {
  addEventListener("keyrefused", ({ detail }) => listener(detail));
}
