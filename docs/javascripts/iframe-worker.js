// A Worker for pages that are opened from the disk, for which browsers start none: the script runs in a hidden
// frame. Owns no more of a Worker than the theme's search uses.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inside = frame.contentDocument;
      inside.open(); // else Firefox replaces the empty page a moment later
      inside.write("<!DOCTYPE html><title>Search</title><body>");
      inside.close();
      this.scope = frame.contentWindow;
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.createElement("script");
      this.hasLoaded = new Promise(resolve => script.addEventListener("load", resolve));
      script.src = url;
      inside.body.appendChild(script);
    }

    postMessage(data) {
      this.hasLoaded.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
