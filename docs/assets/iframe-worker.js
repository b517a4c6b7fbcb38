/* A page opened as a file may start no Worker, and its search would be dead: here the worker's script runs in a frame. */
"use strict";
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.waiting = []; // said before the frame could hear
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html><title>worker</title>";
      frame.addEventListener("load", () => this.begin(frame, String(url)), { once: true });
      document.body.appendChild(frame);
    }

    begin(frame, url) {
      const inside = frame.contentWindow;
      inside.postMessage = (data) => {
        // later, as from another thread: whoever asked may not listen yet
        setTimeout(() => {
          const event = new MessageEvent("message", { data });
          this.dispatchEvent(event);
          if (this.onmessage) this.onmessage(event);
        });
      };
      inside.importScripts = (...urls) => urls.reduce((before, each) => before.then(() => this.load(inside, each)), Promise.resolve());
      this.load(inside, url).then(() => {
        this.inside = inside;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
    }

    load(inside, url) {
      return new Promise((resolve, reject) => {
        const script = inside.document.createElement("script");
        script.src = url;
        script.onload = () => resolve();
        script.onerror = () => reject(new Error(`${url} cannot be loaded`));
        inside.document.head.appendChild(script);
      });
    }

    postMessage(data) {
      if (!this.inside) this.waiting.push(data);
      else setTimeout(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.inside = null;
    }
  };
}
