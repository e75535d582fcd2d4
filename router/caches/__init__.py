"""Named caches: beginnings of prompts that clients have named, kept in Redis under the cluster secret."""
