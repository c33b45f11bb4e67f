"""hurrayd: the daemon that receives, keeps and serves snapshots on a node."""
