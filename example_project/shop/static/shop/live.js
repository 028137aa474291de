// While events are under way, fetch the page again and put the new orders in place of the old.
"use strict";

async function follow() {
  const orders = document.getElementById("orders");
  if (!orders || !("live" in orders.dataset)) return;
  try {
    const page = await (await fetch(location.pathname)).text();
    const fresh = new DOMParser().parseFromString(page, "text/html").getElementById("orders");
    if (fresh) orders.replaceWith(fresh);
  } catch {
    // The server is away for a moment, as after a reload; ask again.
  }
  setTimeout(follow, 1000);
}

follow();
