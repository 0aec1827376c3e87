"""Redis, a worker and a replica are killed under load: which requests fail?"""
