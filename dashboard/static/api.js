// Calls of the REST API. A refusal becomes an Error whose message says what happened and what to do. A body that is a
// text is YAML.

export async function call(method, path, body) {
  const options = {method, headers: {Accept: "application/json"}};
  if (body !== undefined) {
    const isText = typeof body === "string";
    options.headers["Content-Type"] = isText ? "application/yaml" : "application/json";
    options.body = isText ? body : JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(`/api/v1${path}`, options);
  } catch {
    throw new Error("The server does not answer. Try again when the page is live again.");
  }
  const answer = response.status === 204 ? null : await response.json().catch(() => ({}));
  if (response.ok) return {status: response.status, body: answer};
  const text = [answer.detail || response.statusText, answer.fix].filter(Boolean).join(". ");
  throw Object.assign(new Error(text), {status: response.status, errors: answer.errors || []});
}

// Reading that may fail quietly: the banner already says that the server is away.
export const read = (path) => call("GET", path).then((answer) => answer.body, () => null);
