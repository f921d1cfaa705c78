"""The one thing app and learner share: typed records, SQL, migrations' target metadata, the durable ready-queue."""
