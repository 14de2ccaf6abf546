// The server: requests, streams of events, answers of a model as they are written.

const ROOT = new URL("../../", import.meta.url); // keeps a proxy's prefix

export class ApiError extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

export const url = (path) => new URL(path, ROOT).href;

export async function request(path, options = {}) {
  let answer;
  try {
    answer = await fetch(url(path), { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer.");
  }
  if (answer.ok) return answer;
  throw new ApiError(answer.status, await errorText(answer));
}

async function errorText(answer) {
  const text = await answer.text();
  try {
    const body = JSON.parse(text);
    return String(body.detail ?? body.error?.message ?? text);
  } catch {
    return text || answer.statusText;
  }
}

export async function get(path) {
  return (await request(path)).json();
}

/** Server-sent events by name, until the returned function is called. lost: the stream is not
 * coming back by itself. */
export function events(path, handlers, lost) {
  const source = new EventSource(url(path));
  for (const [name, handle] of Object.entries(handlers)) {
    source.addEventListener(name, (event) => handle(JSON.parse(event.data)));
  }
  source.addEventListener("error", () => {
    if (source.readyState === EventSource.CLOSED) lost();
  });
  return () => source.close();
}

/** The answer of a model, piece by piece. */
export async function* chat(body, signal) {
  const answer = await request("console/chat", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ") || block === "data: [DONE]") continue;
      const chunk = JSON.parse(block.slice("data: ".length));
      if (chunk.error) throw new ApiError(500, chunk.error.message);
      yield chunk.choices[0]?.delta ?? {};
    }
  }
}
