// The live feed: server-sent events; polling while all places for streams are taken; retries for ever.
//
// EventSource tells the two failures apart by its readyState: CONNECTING, the connection broke and the browser
// retries by itself; CLOSED, the server refused (503). Then we poll for a minute and try the stream again.

const POLL_MS = 1000;
const STREAM_AGAIN_MS = 60000;

export function startFeed({onSnapshot, onConnection}) {
  let newestUs = -1;

  const take = (snapshot) => {
    newestUs = snapshot.at_us;
    if (snapshot.at_us) onSnapshot(snapshot);
  };

  function openStream() {
    const source = new EventSource("/api/v1/live/stream");
    source.onopen = () => onConnection("live");
    source.addEventListener("snapshot", (event) => take(JSON.parse(event.data)));
    source.onerror = () => {
      if (source.readyState === EventSource.CLOSED) {
        poll(Date.now() + STREAM_AGAIN_MS);
      } else {
        onConnection("lost");
      }
    };
  }

  async function poll(untilMs) {
    try {
      const response = await fetch(`/api/v1/live?since=${newestUs}`);
      if (response.status === 200) take(await response.json());
      onConnection(response.ok ? "polling" : "lost");
    } catch {
      onConnection("lost");
    }
    if (Date.now() < untilMs) setTimeout(poll, POLL_MS, untilMs);
    else openStream();
  }

  openStream();
}
