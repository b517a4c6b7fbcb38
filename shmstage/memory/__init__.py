"""Where bytes live: layouts, pools, slots, who is alive, and what memory is left."""
