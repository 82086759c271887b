/* Server-sent events with reconnection. A hidden tab closes its connection, since browsers allow six per host by HTTP/1.1. */

const MIN_WAIT_MS = 500;
const MAX_WAIT_MS = 8000;

/**
 * Receive the events of `url` until the returned function is called.
 * handlers: functions of the parsed data, by event name. opened: called after each connection, to read what was missed.
 * refused: called and awaited after a lost or refused connection, before the next attempt; it may ask for the token.
 * status: called with "live", "waiting" (for the next attempt) or "resting" (the tab is hidden).
 */
export function listen(url, handlers, { opened = () => {}, status = () => {}, refused = async () => {} } = {}) {
  let source = null;
  let timer = null;
  let wait = MIN_WAIT_MS;
  let ended = false;

  function open() {
    timer = null;
    if (ended || source || document.hidden) return;
    source = new EventSource(url, { withCredentials: false });
    source.onopen = () => {
      wait = MIN_WAIT_MS;
      status("live");
      opened();
    };
    source.onerror = reconnect;
    for (const [name, handler] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => handler(JSON.parse(event.data)));
    }
  }

  async function reconnect() {
    close();
    if (ended) return;
    status("waiting");
    await refused();
    if (ended || source) return;
    clearTimeout(timer);
    timer = setTimeout(open, wait);
    wait = Math.min(2 * wait, MAX_WAIT_MS);
  }

  function close() {
    clearTimeout(timer);
    source?.close();
    source = null;
  }

  function followVisibility() {
    if (document.hidden) {
      close();
      status("resting");
    } else if (!source) {
      clearTimeout(timer);
      open();
    }
  }

  document.addEventListener("visibilitychange", followVisibility);
  window.addEventListener("online", followVisibility);
  followVisibility();
  return () => {
    ended = true;
    document.removeEventListener("visibilitychange", followVisibility);
    window.removeEventListener("online", followVisibility);
    close();
  };
}
